#!/usr/bin/env bash
# Creates $VENV with $PYTHON and installs the package as constraints.txt pins it, with the extras $EXTRAS ("" = none, as on the
# nodes of a cluster; default: dev). Says first what it will download.
set -euo pipefail
: "${PYTHON:?no Python of at least 3.11 was found; set PYTHON=/path/to/python3.11}" "${VENV:=.venv}" "${TORCH_CPU_INDEX:=}" "${EXTRAS=dev}"

torch_pin="$(sed -n 's/^torch==//p' constraints.txt)"
gpu=no
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then gpu=yes; fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
python="$VENV/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ "$gpu" = yes ]; then
    # The pin without a local version: a CPU build that pip may also see (torch==X+cpu) must not be taken here.
    echo "elastic: NVIDIA GPU found. Downloads torch $torch_pin with its CUDA packages (2-4 GB), ray and about 95 small packages (400 MB)."
    "$python" -m pip install -q "torch===$torch_pin"
elif [ "$(uname -s)" = Darwin ] || [[ "$("$python" -m pip index versions torch 2>/dev/null)" == *"$torch_pin+cpu"* ]]; then
    echo "elastic: no NVIDIA GPU. Downloads the CPU build of torch $torch_pin (200 MB), ray and about 95 small packages (400 MB)."
else
    echo "elastic: no NVIDIA GPU. Downloads the CPU build of torch $torch_pin (200 MB) from $TORCH_CPU_INDEX,"
    echo "         and ray and about 95 small packages (400 MB) from pip's own index."
    "$python" -m pip install -q --no-deps --index-url "$TORCH_CPU_INDEX" "torch==$torch_pin"
fi
"$python" -m pip install -q -c constraints.txt -e ".${EXTRAS:+[$EXTRAS]}"
"$python" -c 'import torch, ray; print(f"elastic: installed torch {torch.__version__}, ray {ray.__version__}")'
