"""Launch files for a plan: who runs where, and the lines that start it."""

from __future__ import annotations

import json
import shlex

from cost_model.quantities import counted
from cost_model.report import as_json
from cost_model.search import Plan
from cost_model.size import Sizing

# Cores of the S-worker's host: it drives the GPU, samples, and moves q, k, v and o.
S_WORKER_CORES = 8


def launch_files(sizing: Sizing, model: str) -> dict[str, str]:
    """File name → text: hostfile and rankfile (edit the host names), run.sh for mpirun, job.sbatch for Slurm, and the
    plan itself as plan.json.

    Args:
        model: the model's directory, as ``fastdecode generate --model`` takes it.
    """
    assert sizing.plan is not None
    return {
        "hostfile": _hostfile(sizing.plan),
        "rankfile": _rankfile(sizing.plan),
        "run.sh": _run_script(sizing, sizing.plan, model),
        "job.sbatch": _sbatch(sizing, sizing.plan, model),
        "plan.json": json.dumps(as_json(sizing), indent=2) + "\n",
    }


def _r_hosts(plan: Plan) -> list[tuple[str, int]]:
    """(host, R-workers on it), as full as they go."""
    full, rest = divmod(plan.sockets, plan.sockets_per_host)
    counts = [plan.sockets_per_host] * full + ([rest] if rest else [])
    return [(f"r{i}", count) for i, count in enumerate(counts)]


def _hostfile(plan: Plan) -> str:
    lines = ["# Put your hosts' names in place of s0, r0, r1, ...; s0 has the GPU.", "s0 slots=1"]
    lines += [f"{host} slots={count}" for host, count in _r_hosts(plan)]
    return "\n".join(lines) + "\n"


def _rankfile(plan: Plan) -> str:
    """One R-worker a socket, on all of its cores: its threads and its memory stay on one NUMA node."""
    lines = [f"rank 0=s0 slot=0:0-{S_WORKER_CORES - 1}"]
    rank = 1
    for host, count in _r_hosts(plan):
        for socket in range(count):
            lines.append(f"rank {rank}={host} slot={socket}:*")
            rank += 1
    return "\n".join(lines) + "\n"


def _generate_line(sizing: Sizing, plan: Plan, model: str) -> str:
    setup, workload = sizing.setup, sizing.setup.workload
    options = [
        f"--model {shlex.quote(model)} --device cuda",
        f"--dtype {setup.dtype} --kv-dtype {setup.kv_dtype} --max-model-len {workload.peak_context_tokens}",
        f"--max-num-sequences {plan.batch} --lanes {plan.lanes}",
        '--input "$INPUT" --output "$OUTPUT"',
    ]
    return " \\\n    ".join(["fastdecode generate", *options])


def _mpirun(sizing: Sizing, plan: Plan, model: str, where: str) -> str:
    return (
        f"mpirun {where} \\\n"
        f"  -x MPI4PY_RC_THREAD_LEVEL=serialized -x OMPI_MCA_mpi_yield_when_idle=1 \\\n"
        f"  -n 1 {_generate_line(sizing, plan, model)} \\\n"
        f"  : -n {plan.sockets} fastdecode r-worker"
    )


def _summary(sizing: Sizing, plan: Plan) -> str:
    step = plan.expected
    return (
        f"# {sizing.setup.spec.name} on {sizing.system.s.name}: {counted(plan.sockets, 'R-worker')} on "
        f"{counted(plan.hosts, 'host')} of {sizing.system.r.name},\n"
        f"# {counted(plan.batch, 'sequence')} at once in {counted(plan.lanes, 'lane')}; expected "
        f"{step.tokens_per_s:,.0f} tokens/s, {step.tpot_s * 1e3:.3g} ms a token."
    )


def _run_script(sizing: Sizing, plan: Plan, model: str) -> str:
    return f"""#!/bin/sh
{_summary(sizing, plan)}
# Usage: sh run.sh IN.jsonl OUT.jsonl     (edit the host names in hostfile and rankfile first)
# The line is Open MPI 5's; Open MPI 4 says --rankfile FILE in place of --map-by rankfile:file=FILE.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
INPUT=$1
OUTPUT=$2
{_mpirun(sizing, plan, model, '--hostfile "$here/hostfile" --map-by "rankfile:file=$here/rankfile"')}
"""


def _sbatch(sizing: Sizing, plan: Plan, model: str) -> str:
    """A heterogeneous job: one node with GPUs, and the R-workers' nodes, whole."""
    return f"""#!/bin/bash
{_summary(sizing, plan)}
# Usage: sbatch job.sbatch IN.jsonl OUT.jsonl     (add your partitions and account)
#SBATCH --job-name=fastdecode
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task={S_WORKER_CORES} --gpus-per-node={sizing.setup.num_gpus}
#SBATCH hetjob
#SBATCH --nodes={plan.hosts} --ntasks={plan.sockets} --ntasks-per-node={plan.sockets_per_host} --exclusive --mem=0
set -eu
INPUT=$1
OUTPUT=$2
ranks=$(mktemp)
trap 'rm -f "$ranks"' EXIT
echo "rank 0=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0") slot=0:0-{S_WORKER_CORES - 1}" > "$ranks"
rank=1
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1"); do
  for socket in {" ".join(str(i) for i in range(plan.sockets_per_host))}; do
    if [ "$rank" -le {plan.sockets} ]; then echo "rank $rank=$host slot=$socket:*" >> "$ranks"; fi
    rank=$((rank + 1))
  done
done
{_mpirun(sizing, plan, model, '--map-by "rankfile:file=$ranks"')}
"""
