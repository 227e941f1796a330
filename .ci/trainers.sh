#!/usr/bin/env bash
# Real trainers for the tests, on the CPU: trainers.sh PYTHON FOLDER. Makes FOLDER, a virtual environment of its own with
# TRL and verl (1.9 GB). PYTHON is the project's own, whose pip does the work. Safe to run again: what is there already
# stays, until the pins change.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2
pins=.ci/trainers-pins.txt

pip() { "$python" -m pip --python "$venv/bin/python" --disable-pip-version-check "$@" </dev/null; }

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "trainers: their releases are pinned for Linux on x86-64, this is $(uname -sm): these tests can't run here" >&2
    exit 1
fi

wanted=$(cat "$pins" .ci/trainers.sh | sha256sum | cut -d ' ' -f 1)
[ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ] || exit 0
echo "trainers: installing TRL and verl for the CPU into $venv (1.9 GB; two minutes)"
rm -rf "$venv"
"$python" -m venv --without-pip "$venv"
# -qq: not a line for each package folder that pip looks for in vain; its errors are shown.
if ! pip -qq install --no-deps --no-compile -r "$pins"; then
    torch=$(grep '^torch==' "$pins")
    echo "trainers: a wheel could not be had, see above. If it is $torch: PyTorch keeps its CPU builds in an index of" \
        "its own, tell pip where that is (PIP_EXTRA_INDEX_URL, or a folder of wheels in PIP_FIND_LINKS)." >&2
    exit 1
fi
# Compiled here, on all processors: left to the first import, that takes its time there (and where
# PYTHONDONTWRITEBYTECODE is set, at every import). Some packages carry templates that are no Python: no fault.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" >/dev/null || true
echo "$wanted" >"$venv/.installed"
