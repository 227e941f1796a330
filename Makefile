# One command each. `make demo` and `make test` do their own set-up: a virtual environment in .venv, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-train test test-slurm test-vllm test-trainers check format bench soak system docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## see the line run: 32 tasks x 4 samples through three worker processes (ARGS="--json")
	$(BIN)/rollout demo $(ARGS)

demo-train: $(STAMP) ## a real RL run: TRL on a tiny model, vLLM on the CPU, five minutes, with a plot (ARGS="-- --steps 20")
	@.ci/vllm.sh $(BIN)/python $(VENV)-vllm
	@.ci/trainers.sh $(BIN)/python $(VENV)-trainers
	$(BIN)/python benchmarks/train.py --json benchmarks/results/train.json $(ARGS)

test: $(STAMP) ## all tests but the long ones; with CI=true installs the services first (ARGS="-k queue")
	@if [ "$${CI:-}" = true ]; then $(MAKE) --no-print-directory system; fi
	@.ci/tests.sh $(BIN)/pytest $(ARGS)

test-slurm: $(STAMP) ## tests on a private Slurm of four nodes, seven minutes (ARGS='-m "not slow"' leaves the long ones out)
	@if [ "$${CI:-}" = true ]; then $(MAKE) --no-print-directory system; fi
	@$(BIN)/pytest tests/slurm $(ARGS) </dev/null

test-vllm: $(STAMP) ## tests against a real vLLM on the CPU; installs it into .venv-vllm first, 3 GB (ARGS='-m "not slow"')
	@.ci/vllm.sh $(BIN)/python $(VENV)-vllm
	@$(BIN)/pytest tests/vllm $(ARGS) </dev/null

test-trainers: $(STAMP) ## tests with real trainers (TRL, verl) on the CPU, and vLLM; .venv-trainers, 1.9 GB (ARGS='-m "not slow"')
	@.ci/vllm.sh $(BIN)/python $(VENV)-vllm
	@.ci/trainers.sh $(BIN)/python $(VENV)-trainers
	@$(BIN)/pytest tests/trainers $(ARGS) </dev/null

check: $(STAMP) ## format, lint, types, import rule
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_packaging.py

format: $(STAMP) ## put the code into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## figures of this machine, into benchmarks/results/ (keep the machine idle)
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/line.py --json benchmarks/results/line.json $(ARGS)
	$(BIN)/python benchmarks/cancel.py --json benchmarks/results/cancel.json
	$(BIN)/python benchmarks/policy.py --json benchmarks/results/policy.json
	$(BIN)/python benchmarks/handlers.py --json benchmarks/results/handlers.json
	$(BIN)/python benchmarks/trainer.py --json benchmarks/results/trainer.json
	$(BIN)/python benchmarks/fleet.py --json benchmarks/results/fleet.json
	$(BIN)/python benchmarks/payload_files.py --json benchmarks/results/payload_files.json
	$(BIN)/python benchmarks/scaling.py --json benchmarks/results/scaling.json

soak: $(STAMP) ## the full sizes: the long tests, then the benchmarks
	$(BIN)/pytest tests -m slow --timeout 3600 --ignore tests/slurm --ignore tests/vllm --ignore tests/trainers $(ARGS)
	@$(MAKE) --no-print-directory test-slurm ARGS="-m slow --timeout 3600"
	@$(MAKE) --no-print-directory test-vllm ARGS="-m slow"
	@$(MAKE) --no-print-directory test-trainers ARGS="-m slow"
	@$(MAKE) --no-print-directory bench ARGS=

system: ## what changes the machine: installs Redis, bubblewrap, busybox, Apptainer, Chromium and Slurm where missing; says so first
	@.ci/system.sh

docs: $(STAMP) ## write docs/config.md, docs/redis-keys.md and sbatch/ anew, from config.yaml and the code
	$(BIN)/python .ci/config_page.py > docs/config.md
	$(BIN)/python .ci/keys_page.py > docs/redis-keys.md
	$(BIN)/python .ci/sbatch_pages.py

clean: ## remove .venv, .venv-vllm, .venv-trainers and caches
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-trainers .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(STAMP): pyproject.toml .ci/constraints.txt .ci/venv.sh
	@.ci/venv.sh "$(PYTHON)" "$(VENV)"
	@touch $(STAMP)
