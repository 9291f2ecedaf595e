#!/bin/sh
# One S-worker and two R-workers as ranks of an MPI job, on this machine.
# Usage: sh examples/cluster.sh [MODEL_DIR [IN.jsonl [OUT.jsonl]]]
# Over hosts, replace "localhost:2" by "s0:0,r0:2,r1:2" (host:R-workers); see examples/mpi_cluster.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec fastdecode launch --hosts localhost:2 -- generate --temperature 0 --max-tokens 40 \
    --model "${1:-$here/model/checkpoint}" \
    --input "${2:-$here/prompts.jsonl}" \
    --output "${3:-cluster_answers.jsonl}"
