#!/bin/bash
# A verdict about a GPU in ten minutes, without a network: is it right, is it fast?
#
#   benchmarks/gpu_first.sh [--smoke] [--more | --only STEP ...] [--out FILE]
#
# Needs a Python (PYTHON, default python3). Steps whose packages are missing are left out, and named.
# docs/guides/gpu.md says how to read it; benchmarks/gpu.py --help what the exit codes are.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$PWD/.numba_cache}  # each step is a process of its own
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
