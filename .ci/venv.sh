#!/usr/bin/env bash
# Makes the virtual environment and installs the project with its pinned libraries: venv.sh PYTHON FOLDER.
# Changes nothing outside FOLDER; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if ! { [ -x "$venv/bin/python" ] && new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    for candidate in "$python" python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then found=$candidate; break; fi
    done
    if [ -z "${found:-}" ]; then
        version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo none)
        echo "Python 3.11 or newer is needed, '$python' is $version: install one, or say 'make PYTHON=/path/to/python3.11'." >&2
        exit 1
    fi
    echo "making $venv with $("$found" --version)"
    rm -rf "$venv"
    if ! reason=$("$found" -m venv "$venv" 2>&1); then
        # Debian ships Python without ensurepip; the pip of the machine, where there is one, can fill the environment.
        rm -rf "$venv"
        if ! { "$found" -m venv --without-pip "$venv" && "$found" -m pip --python "$venv/bin/python" install -q pip; } 2>/dev/null; then
            rm -rf "$venv"
            echo "$reason" >&2
            echo "'$found' can't make a virtual environment with pip: install it (Debian, Ubuntu: apt-get install python3-venv)." >&2
            exit 1
        fi
    fi
fi
echo "installing rollout-line and its libraries into $venv (a minute or two at the first time)"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -c .ci/constraints.txt -e '.[dev,swe,web,parquet]'
