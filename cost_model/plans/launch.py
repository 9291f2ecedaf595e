"""Launch files for a plan: who runs where, and the lines that start it."""

from __future__ import annotations

import json
import shlex

from cost_model.plans.report import as_json
from cost_model.plans.search import Plan
from cost_model.plans.size import Sizing
from cost_model.printing import counted, seconds_text
from fastdecode.wire.mpirun_line import JobHost, JobLine

# Cores of the S-worker's host: it drives the GPUs, samples, and moves q, k, v and o.
S_WORKER_CORES = 8
S_HOST = "s0"


def launch_files(sizing: Sizing, model: str) -> dict[str, str]:
    """Return file name → text: run.sh for mpirun, job.sbatch for Slurm, hostfile and rankfile with
    the same placement for other launch lines, and the plan itself."""
    plan, num_gpus = sizing.plan, sizing.setup.num_gpus
    assert plan is not None
    full, rest = divmod(plan.sockets, plan.sockets_per_host)
    counts = [plan.sockets_per_host] * full + ([rest] if rest else [])
    hosts = tuple(JobHost(f"r{i}", count) for i, count in enumerate(counts))
    lines = [f"# Put your hosts' names in place of {S_HOST}, r0, r1, ...; {S_HOST} has the GPU."]
    lines += [f"{S_HOST} slots={num_gpus}"]
    lines += [f"{host.name} slots={host.num_r_workers}" for host in hosts]
    # One R-worker a socket, on all of its cores: its threads and its memory stay on one NUMA node.
    share = max(1, S_WORKER_CORES // num_gpus)
    slots = [(S_HOST, f"0:{gpu * share}-{(gpu + 1) * share - 1}") for gpu in range(num_gpus)]
    slots += [(host.name, f"{socket}:*") for host in hosts for socket in range(host.num_r_workers)]
    ranks = (f"rank {rank}={host} slot={slot}\n" for rank, (host, slot) in enumerate(slots))
    return {
        "hostfile": "\n".join(lines) + "\n",
        "rankfile": "".join(ranks),
        "run.sh": _run_script(sizing, plan, model, hosts),
        "job.sbatch": _sbatch(sizing, plan, model),
        "plan.json": json.dumps(as_json(sizing), indent=2) + "\n",
    }


def _generate(sizing: Sizing, plan: Plan, model: str) -> tuple[str, ...]:
    """Return the S-worker's command. INPUT and OUTPUT are the script's."""
    setup = sizing.setup
    options = {
        "--model": model,
        "--device": "cuda",
        "--tp": setup.num_gpus,
        "--dtype": setup.dtype,
        "--kv-dtype": setup.kv_dtype,
        "--max-model-len": setup.workload.peak_context_tokens,
        "--max-num-sequences": plan.batch,
        "--lanes": plan.lanes,
        "--input": "$INPUT",
        "--output": "$OUTPUT",
    }
    if setup.num_gpus == 1:
        del options["--tp"]
    if sizing.goal.replicas:
        options["--replicas"] = sizing.goal.replicas
    return ("generate", *(str(word) for option in options.items() for word in option))


def _with_arguments(line: str) -> str:
    return line.replace("'$INPUT'", '"$INPUT"').replace("'$OUTPUT'", '"$OUTPUT"')


def _summary(sizing: Sizing, plan: Plan) -> str:
    step = plan.expected
    return (
        f"# {sizing.setup.spec.name} on {sizing.system.s.name}: "
        f"{counted(plan.sockets, 'R-worker')} on {counted(plan.hosts, 'host')} of "
        f"{sizing.system.r.name},\n"
        f"# {counted(plan.batch, 'sequence')} at once in {counted(plan.lanes, 'lane')}; expected "
        f"{step.tokens_per_s:,.0f} tokens/s, {seconds_text(step.tpot_s)} a token."
    )


def _run_script(sizing: Sizing, plan: Plan, model: str, hosts: tuple[JobHost, ...]) -> str:
    line = JobLine(
        s_command=("fastdecode", *_generate(sizing, plan, model)),
        r_command=("fastdecode", "r-worker", "--numa-node", "auto"),
        hosts=hosts,
        s_host=S_HOST,
        num_s_ranks=sizing.setup.num_gpus,
    )
    return f"""#!/bin/sh
{_summary(sizing, plan)}
# Usage: sh run.sh IN.jsonl OUT.jsonl
# First put your hosts' names in place of {S_HOST}, r0, r1, ..., and the
# checkpoint's directory behind --model.
# The line is Open MPI's. fastdecode launch builds it for MPICH, too, and for a
# network of your choice.
set -eu
INPUT=$1
OUTPUT=$2
{_with_arguments(line.shown())}
"""


def _sbatch(sizing: Sizing, plan: Plan, model: str) -> str:
    """Return a heterogeneous job: one node with GPUs, and the R-workers' nodes, whole."""
    return f"""#!/bin/bash
{_summary(sizing, plan)}
# Usage: sbatch job.sbatch IN.jsonl OUT.jsonl
# First add your partitions and account, and the checkpoint's directory behind
# --model.
#SBATCH --job-name=fastdecode
#SBATCH --nodes=1 --ntasks={sizing.setup.num_gpus} --cpus-per-task={S_WORKER_CORES} \
--gpus-per-node={sizing.setup.num_gpus}
#SBATCH hetjob
#SBATCH --nodes={plan.hosts} --ntasks={plan.sockets} \
--ntasks-per-node={plan.sockets_per_host} --exclusive --mem=0
set -eu
INPUT=$1
OUTPUT=$2
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0"):0"
left={plan.sockets}
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1"); do
  count=$((left < {plan.sockets_per_host} ? left : {plan.sockets_per_host}))
  hosts="$hosts,$host:$count"
  left=$((left - count))
done
fastdecode launch --hosts "$hosts" -- \\
    {_with_arguments(shlex.join(_generate(sizing, plan, model)))}
"""
