"""Ctrl-C at random moments of calls of an ``LLM``, which answers the same call
afterwards as if nothing had been. A program of its own: the signals are its.

    python tests/campaign/interrupts.py NUMBER SEED JSON     # options of the LLM
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastdecode import LLM, PromptRequest, SamplingParams

MODEL = Path(__file__).parents[2] / "examples" / "model" / "checkpoint"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPTS = ["The fox", "A long time ago", "Two", "There was a girl who"]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True, temperature=0),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, top_p=0.9, seed=7),
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8, seed=8, n=2),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0),
]
UNHEARD_S = 60.0


def calls(llm: LLM, template: Path) -> dict[str, Callable[[], Any]]:
    """What may be interrupted, and what it answers."""

    def requests() -> list[PromptRequest]:
        asked = zip(PROMPTS, PARAMS, strict=True)
        return [PromptRequest(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(asked)]

    def tokens(outputs: Any) -> dict[str, Any]:
        assert all(output.ok for output in outputs), [output.error for output in outputs]
        return {o.request_id: [c.token_ids for c in o.completions] for o in outputs}

    def by_deltas() -> Any:
        found: dict[tuple[str, int], tuple[int, ...]] = {}
        for delta in llm.deltas(requests()):
            assert delta.error is None, delta.error
            key = delta.request_id, delta.index
            found[key] = found.get(key, ()) + delta.token_ids
        return found

    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return {
        "generate": lambda: tokens(llm.generate(PROMPTS, PARAMS)),
        "chat": lambda: tokens(llm.chat(chats, PARAMS, chat_template=template)),
        "stream": lambda: tokens(list(llm.stream(requests()))),
        "deltas": by_deltas,
    }


def interrupted(call: Callable[[], Any], after_s: float) -> bool:
    """Make a call, with Ctrl-C after a while. Whether it was in time."""
    main = threading.main_thread().ident or 0
    timer = threading.Timer(after_s, lambda: signal.pthread_kill(main, signal.SIGINT))
    is_over = False
    try:
        timer.start()
        call()
        is_over = True
        timer.join()  # the signal comes now, and ends the wait
        assert threading.Event().wait(UNHEARD_S), "the interrupt was heard by nobody"
        return False
    except KeyboardInterrupt:
        return not is_over


def main(number: int, seed: int, options: dict[str, Any]) -> None:
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    with TemporaryDirectory() as directory, LLM(str(MODEL), dtype="float32", **options) as llm:
        template = Path(directory, "template.jinja")
        template.write_text(TEMPLATE)
        every = calls(llm, template)
        expected, lengths = {}, {}
        for name, call in every.items():
            call()
            started = time.perf_counter()
            expected[name] = call()
            lengths[name] = time.perf_counter() - started
        while counts["interrupted"] < number:
            name = chance.choice(list(every))
            heard = interrupted(every[name], chance.uniform(0, lengths[name]))
            counts["interrupted" if heard else "too late"] += 1
            again = chance.choice(list(every))
            counts["changed"] += every[again]() != expected[again]
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
