#!/bin/bash
# Everything that needs a GPU, in one call of under 10 minutes and without a network: tests, then measurements.
#
#   benchmarks/gpu_suite.sh [--smoke] [OUT_DIRECTORY]
#
# Needs a Python (PYTHON, default python3) with torch, numba, numpy, psutil, tqdm, mpi4py, safetensors, tokenizers,
# transformers and pytest. With --smoke it runs on a CPU with tiny sizes, to see that it would run.
# Results: OUT_DIRECTORY/gpu_suite.json (default benchmarks/results); a table comes last on stdout.
set -uo pipefail
cd "$(dirname "$0")/.."
smoke=()
if [[ ${1:-} == --smoke ]]; then smoke=(--smoke); shift; fi
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# The project's pytest options name plugins that may not be there.
timeout 240 "$python" -m pytest -o addopts=--import-mode=importlib -q -rs tests/gpu 2>&1 | tail -25
tests=${PIPESTATUS[0]}
timeout 350 "$python" benchmarks/gpu_suite.py "${smoke[@]}" --tests-exit-code "$tests" --out "$out/gpu_suite.json"
suite=$?
exit $((suite ? suite : tests))
