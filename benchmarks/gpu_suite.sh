#!/bin/bash
# Everything that needs a GPU, in two calls of under 10 minutes each and without a network: tests and measurements; then
# whole engines.
#
#   benchmarks/gpu_suite.sh [--smoke] [OUT_DIRECTORY]
#   benchmarks/gpu_suite.sh [--smoke] --end-to-end [OUT_DIRECTORY]
#   benchmarks/gpu_suite.sh [--smoke] --more [OUT_DIRECTORY]
#
# The third one, of seven minutes, is beside the goals: CUDA's sanitizer over what copies and attends, pinned memory of
# either kind, prompts of 40 lengths one by one, what the host takes a lane and layer by the number of R-workers, and
# lanes whose KV is swapped.
#
# Needs a Python (PYTHON, default python3) with torch, numba, numpy, psutil, mpi4py, safetensors, tokenizers,
# transformers and pytest. With --smoke it runs on a CPU with tiny sizes, to see that it would run.
# Results: OUT_DIRECTORY/gpu_suite.json and gpu_tests.txt, gpu_end_to_end.json, or gpu_more.json and gpu_sanitizer.txt
# (default benchmarks/results), written
# after each section; a table comes last on stdout. Exit code 0 only if every test passed and every measurement was made.
set -uo pipefail
cd "$(dirname "$0")/.."
smoke=()
if [[ ${1:-} == --smoke ]]; then smoke=(--smoke); shift; fi
call=measure
if [[ ${1:-} == --more ]]; then call=more; shift; fi
if [[ ${1:-} == --end-to-end ]]; then call=end-to-end; shift; fi
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$PWD/.numba_cache}  # each section is a process of its own
for package in torch numba numpy psutil mpi4py safetensors tokenizers transformers pytest; do
    "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$package') is None)" || missing+=" $package"
done
if [[ -n ${missing:-} ]]; then echo "gpu_suite.sh: $python lacks$missing" >&2; exit 2; fi
if [[ $call == end-to-end ]]; then
    exec "$python" benchmarks/gpu_suite.py "${smoke[@]}" --call end-to-end --out "$out/gpu_end_to_end.json"
fi
if [[ $call == more ]]; then
    # Graphs are off in these tests: the sanitizer doesn't see what a graph does.
    TORCH_CUDA_SANITIZER=1 timeout -k 5 120 "$python" -m pytest -o addopts=--import-mode=importlib -v -rs tests/gpu \
        --ignore tests/gpu/test_suite_smoke.py -k "staging or paged or prompts_in_one_call" \
        > "$out/gpu_sanitizer.txt" 2>&1
    tests=$?
    tail -20 "$out/gpu_sanitizer.txt"
    "$python" benchmarks/gpu_suite.py "${smoke[@]}" --call more --limit-s $((400 - SECONDS)) \
        --tests-exit-code "$tests" --out "$out/gpu_more.json"
    suite=$?
    exit $((suite ? suite : tests))
fi
# The project's pytest options name plugins that may not be there. The suite's own smoke test would be the suite again.
timeout -k 5 230 "$python" -m pytest -o addopts=--import-mode=importlib -v -rs --durations=8 tests/gpu \
    --ignore tests/gpu/test_suite_smoke.py > "$out/gpu_tests.txt" 2>&1
tests=$?
tail -40 "$out/gpu_tests.txt"
"$python" benchmarks/gpu_suite.py "${smoke[@]}" --call measure --limit-s $((570 - SECONDS)) --tests-exit-code "$tests" \
    --out "$out/gpu_suite.json"
suite=$?
exit $((suite ? suite : tests))
