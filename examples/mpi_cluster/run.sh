#!/bin/sh
# Usage: sh run.sh MODEL_DIR IN.jsonl OUT.jsonl     (edit hostfile, NET and the counts first)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
NET=${NET:-10.0.0.0/24} # the network that MPI is to use: an interface such as eth0, or its address range
R_WORKERS=${R_WORKERS:-4}
# --bind-to none: mpirun binds nobody; R-workers bind themselves, each to the next NUMA node of its host.
# --with-ft ulfm, --mca pml ob1: the loss of an R-worker is told to the others instead of ending the job.
exec mpirun --hostfile "$here/hostfile" --map-by slot --bind-to none \
    --with-ft ulfm --mca pml ob1 --mca btl self,sm,tcp --mca btl_tcp_if_include "$NET" --prtemca prte_if_include "$NET" \
    -n 1 fastdecode generate --device auto --model "$1" --input "$2" --output "$3" \
    : -n "$R_WORKERS" fastdecode r-worker --numa-node auto
