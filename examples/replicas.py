"""Kill an R-worker in the middle of a batch; nothing is lost.

    python examples/replicas.py [MODEL_DIR]

Three R-workers run as processes of their own. ``replicas=1`` keeps every KV
cache a second time, on another R-worker. One process is killed after a third of the
tokens. Its sequences go on from the replica, and end with the tokens of an
undisturbed run.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import PromptRequest

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "model" / "checkpoint")
PROMPTS = ["Once upon a time", "The old map showed", "On a stormy night", "Gusster was a pony"] * 3
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=60, ignore_eos=True)
R_WORKER = [sys.executable, "-m", "fastdecode", "r-worker", "--bind", "tcp://127.0.0.1:0"]


@contextlib.contextmanager
def r_worker_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and the address at which it listens."""
    process = subprocess.Popen(R_WORKER, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if " listens at " in line:
                yield process, line.split(" listens at ")[1].split()[0]
                break
        else:
            raise RuntimeError("the R-worker ended before it listened")
    finally:
        process.kill()
        process.wait()


def undisturbed_run() -> list[str]:
    """Every request's text, of one engine with three R-workers as threads."""
    with LLM(MODEL, r_workers=3) as llm:
        return [output.completions[0].text for output in llm.generate(PROMPTS, PARAMS)]


def run_with_a_loss() -> list[str]:
    """Every request's text; one R-worker dies on the way."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(r_worker_process()) for _ in range(3)]
        addresses = [address for _, address in workers]
        llm = stack.enter_context(LLM(MODEL, r_worker_addresses=addresses, replicas=1))
        requests = [PromptRequest(str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
        texts = dict.fromkeys((request.request_id for request in requests), "")
        num_left = 240  # tokens until the loss, of 720
        for delta in llm.deltas(requests):
            texts[delta.request_id] += delta.text
            num_left -= len(delta.token_ids)
            if num_left <= 0:
                workers[1][0].kill()
        stats = llm.stats
        print(f"resumed from replicas: {stats.resumed.num_sequences} sequences, ", end="")
        print(f"recomputed: {stats.num_recomputed}")
        return list(texts.values())


def main() -> None:
    undisturbed, disturbed = undisturbed_run(), run_with_a_loss()
    print(f"{len(disturbed)} answers; equal to the undisturbed run: {disturbed == undisturbed}")


if __name__ == "__main__":
    main()
