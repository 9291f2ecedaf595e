"""A server whose engine has no model: it says a token for every running
sequence in every step. The first token of a prompt may ask for trouble."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import sys
import threading
import time
from collections.abc import Container
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastdecode.cli.options import add_options, given
from fastdecode.conversations.conversations import Keeping
from fastdecode.core.delta import Delta, DeltaQueue, Listener
from fastdecode.core.errors import CapacityError, FastDecodeError
from fastdecode.core.host.logs import keep_traces_out
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.engine.instances.client import status_to_json
from fastdecode.engine.instances.server import RequestLimits
from fastdecode.engine.service import EngineService
from fastdecode.engine.stats import EngineFigures, EngineStats, HolderFigures
from fastdecode.server.link import Opening, Ready
from fastdecode.server.options import ServeOptions, key_hashes
from fastdecode.server.serving import Bridge, HttpProcess, Serving

VOCAB = 1536
BREAKS, HANGS, NEVER_FITS, IS_WORDY = 1000, 1001, 1002, 1003
"""Prompts that begin with these break the engine's step, keep it, could never
fit, or are answered with long words."""
NUM_BLOCKS = 1000
MOMENT_S = 1e-6  # A step that takes no time lets other threads run, as a model's does


class ScriptedEngine:
    """Like an ``Engine``, as far as a service goes."""

    def __init__(self, step_s: float, width: int) -> None:
        self._step_s = step_s
        self._width = width
        self._open: dict[str, tuple[Request, Listener | None]] = {}
        self._said: dict[tuple[str, int], int] = {}
        self._is_abandoned = threading.Event()
        self.pause_s = 0.0
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def num_running(self) -> int:
        return min(self._width, len(self._said))

    @property
    def num_unfinished_sequences(self) -> int:
        return len(self._said)

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        if request.prompt_token_ids[0] == NEVER_FITS:
            raise CapacityError("it could never fit", code="exceeds_capacity")
        self._open[request.request_id] = request, listener
        self._said.update(((request.request_id, i), 0) for i in range(request.params.n))

    def look(self) -> None:
        pass

    def step(self) -> None:
        self.num_steps += 1
        self._is_abandoned.wait(self._step_s or MOMENT_S)
        for request_id, index in list(self._said)[: self._width]:
            if request_id in self._open:
                self._say(request_id, index)

    def _say(self, request_id: str, index: int) -> None:
        request, listener = self._open[request_id]
        if request.prompt_token_ids[0] == BREAKS:
            raise RuntimeError("this prompt's secret: 4711")
        if request.prompt_token_ids[0] == HANGS:
            self._is_abandoned.wait()
        place = request_id, index
        self._said[place] += 1
        is_over = self._said[place] == request.max_tokens
        token = self._said[place] % VOCAB
        if listener is not None:
            reason = "length" if is_over else None
            text = f" t{token}" + "y" * 4000 * (request.prompt_token_ids[0] == IS_WORDY)
            listener.tell(Delta(request_id, index, text, (token,), None, reason))  # type: ignore[arg-type]
        if is_over:
            del self._said[place]
            if not any(one == request_id for one, _ in self._said):
                del self._open[request_id]

    def cancel(self, request_id: str) -> bool:
        was_open = self._open.pop(request_id, None) is not None
        self._said = {place: n for place, n in self._said.items() if place[0] != request_id}
        return was_open

    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]:
        return []

    def abandon(self, error: FastDecodeError) -> None:
        self._is_abandoned.set()
        self._open.clear()
        self._said.clear()


def figures(served: Any) -> dict[str, Any]:
    engine = served.engine
    num_used, num_steps = engine.num_unfinished_sequences, engine.num_steps
    worker = HolderFigures(
        "R-worker <b>r0</b>", None, NUM_BLOCKS, num_used, num_used, num_steps * 0.001
    )
    return status_to_json(EngineStats(num_steps=num_steps), EngineFigures(1, (worker,)))


def first_token_delays(engine: ScriptedEngine, num_requests: int) -> list[float]:
    """Seconds from asking to the first token, without HTTP, one by one."""
    served = _served(engine)
    service: EngineService = EngineService(lambda: served)
    service.open()
    delays = []
    for i in range(num_requests):
        reader = DeltaQueue()
        asked_s = time.monotonic()
        service.submit([Request(str(i), (1, 2), SamplingParams(), 2, 0)], reader)
        service.take(reader)
        delays.append(time.monotonic() - asked_s)
        while service.snapshot().engine.num_running:
            service.take(reader, 0.01)
    service.close()
    return delays


def _served(engine: ScriptedEngine) -> SimpleNamespace:
    return SimpleNamespace(
        engine=engine, num_r_workers=1, num_live_r_workers=1, has_hung_r_workers=False,
        close=lambda: None,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument_group("server"), ServeOptions)
    add_options(parser.add_argument_group("conversations"), Keeping)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=1 << 20)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--in-process", type=int, help="print first tokens' delays without HTTP")
    args = parser.parse_args()
    if args.in_process is not None:
        print(first_token_delays(ScriptedEngine(args.step_s, args.width), args.in_process))
        return 0
    logging.basicConfig()
    keep_traces_out()
    fields = [field.name for field in dataclasses.fields(ServeOptions)]
    options = ServeOptions(**{name: getattr(args, name) for name in fields})
    model = Path(__file__).parents[1] / "examples" / "model" / "checkpoint"
    keys, keeping = key_hashes(options), given(args, Keeping)
    http = HttpProcess(Opening(str(model), asdict(options), {}, 4096, VOCAB, 256, keys, keeping))
    print(f"listening at {http.address}", flush=True)
    engine = ScriptedEngine(args.step_s, args.width)
    served = _served(engine)
    service: EngineService = EngineService(lambda: served)
    signals = SimpleNamespace(num_stops=0, num_reloads=0)

    def stop(number: int, frame: object) -> None:
        signals.num_stops += 1

    signal.signal(signal.SIGTERM, stop)
    service.open()
    limits = RequestLimits(VOCAB, 4096)
    bridge = Bridge(service, http.channel, limits, figures, options.write_timeout_s)
    bridge.start()
    if not args.never_ready:
        bridge.send(Ready(args.kv_tokens))
    serve = Serving(service, bridge, signals, lambda: None, lambda text: print(text, flush=True))
    ending = serve.run(options.drain_timeout_s)
    http.close()
    return ending


if __name__ == "__main__":
    sys.exit(main())
