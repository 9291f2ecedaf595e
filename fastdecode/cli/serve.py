"""``fastdecode serve``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING

from fastdecode.cli.options import (
    EXIT_SOME_FAILED,
    add_engine_options,
    add_exit_code_option,
    add_options,
    add_sampling_options,
    add_status_option,
    check_engine_options,
    engine_options,
    load_engine,
    model_defaults,
    read_options,
    sampling_given,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.conversations.conversations import Keeping
from fastdecode.conversations.turns import why_no_reuse
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import FastDecodeError, imports_for
from fastdecode.core.files import STANDARD, check_paths
from fastdecode.core.host.processes import Interrupted, interrupt
from fastdecode.engine.rank_roles import serve_other_rank
from fastdecode.jobs.stopping import stop_signals
from fastdecode.server.options import ServeOptions, key_hashes
from fastdecode.wire.mpi.job import joined_at_last
from fastdecode.wire.ranks import launched_rank

if TYPE_CHECKING:
    from types import FrameType

    from fastdecode.engine.llm import LLM
    from fastdecode.server.link import Opening
    from fastdecode.server.serving import Ending, HttpProcess

COMMAND = "fastdecode serve"
ENDS_WITHIN_S = 60.0  # longest time for the step in flight once all requests are answered


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve /v1/completions, /v1/chat/completions and /v1/responses, whole and "
        "as streams, to any client of OpenAI's API. Stops upon SIGTERM or Ctrl-C once what runs "
        "is done; a second time at once."
    )
    parser.set_defaults(run=run_serve)
    add_model(parser)
    server = parser.add_argument_group("server")
    add_options(server, ServeOptions)
    add_status_option(server)
    # Reserve room for expected lengths: without max_tokens a request's limit is the model's.
    add_engine_options(parser, {"length_quantile": 0.9, "expected_output_tokens": 256})
    add_options(parser.add_argument_group("conversations"), Keeping)
    add_sampling_options(parser, "requests", has_chats=True)
    add_exit_code_option(parser)


class Signals:
    """Counts the signals that ask a server to stop, or to read its keys again.

    While it starts, the first stop raises Interrupted, or is only counted where Python swallows
    the exception (in a destructor or a callback). Later ``Serving`` looks at the counts. Once no
    more requests are answered, a stop ends the process by ``leave``. After that it is ignored.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self.num_stops = self.num_reloads = 0
        self.ending: Ending | None = None
        """Set once no request is answered any more. The engine may take long to close."""
        self.is_over = False
        self._leave = leave
        self._interrupts = True
        self.kept: contextlib.ExitStack | None = None
        """Holds the signal handlers until the process ends."""

    def on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:
            return
        self.num_stops += 1
        if self.ending is not None:
            self._leave(self.ending)
        elif self.num_stops > 2:  # something hangs
            self._leave(EXIT_SOME_FAILED)
        elif self.num_stops == 1 and self._interrupts:
            interrupt(number, frame)

    def on_reload(self, number: int, frame: FrameType | None) -> None:
        self.num_reloads += 1

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Delay ``Interrupted``: a C++ library that is interrupted during an import may end the
        process."""
        self._interrupts = False
        try:
            yield
        finally:
            self._interrupts = True
        if self.num_stops:
            raise Interrupted

    def begin(self) -> None:
        """Count stops, and raise no Interrupted. A stop that came already is the first."""
        self._interrupts = False
        self.num_stops = min(self.num_stops, 1)


def run_serve(args: argparse.Namespace) -> int:
    from fastdecode.core.host.logs import keep_traces_out

    signals = Signals()
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_signals(signals.on_stop))
        before = signal.signal(signal.SIGHUP, signals.on_reload)
        stack.callback(signal.signal, signal.SIGHUP, before)
        if args.log_level != "debug":
            stack.callback(keep_traces_out())
        code = _start(args, signals)
        if signals.num_stops or signals.is_over:
            # Keep the handlers while MPI is left: signals change nothing any more.
            signals.kept = stack.pop_all()
    return code


def _start(args: argparse.Namespace, signals: Signals) -> int:
    config, options = check_engine_options(args), read_options(args, ServeOptions)
    check_paths(STANDARD, status=args.status)
    keys = key_hashes(options)
    try:
        code = _load_and_serve(args, config, options, keys, signals)
    except KeyboardInterrupt:
        if signals.ending is not None:
            raise
        tell(f"{COMMAND}: asked to stop while it started; it has answered nothing")
        # The other ranks of an MPI job wait for our goodbye.
        joined_at_last(wanted=True)
        return 0
    signals.is_over = True
    return code


def _load_and_serve(
    args: argparse.Namespace,
    config: EngineConfig,
    options: ServeOptions,
    keys: tuple[str, ...],
    signals: Signals,
) -> int:
    """Raises KeyboardInterrupt: If asked to stop while it starts."""
    with contextlib.ExitStack() as stack:
        http: HttpProcess | None = None
        if launched_rank() in (None, 0):
            with signals.put_off(), imports_for(COMMAND):
                for name in ("httptools", "prometheus_client", "starlette", "uvicorn"):
                    import_module(name)  # the other process needs it; say so here
                from fastdecode.server.serving import HttpProcess
            http = HttpProcess(_opening(args, config, options, keys))
            stack.callback(http.close)
        serve_other_rank(config, tell)
        assert http is not None, "rank 0 has it, and others don't return"
        tell(f"{COMMAND}: listening at {http.address}; loading")
        with signals.put_off(), imports_for(f"{COMMAND} (an S-worker)"):
            load_engine(args)
            from fastdecode.engine.llm import LLM
        # Requests bring the defaults of generation_config.json.
        with LLM(
            args.model, progress=tell, generation_config="ignore", **engine_options(args)
        ) as llm:
            signals.begin()
            signals.ending = _serve(args, llm, http, options, signals)
            code = int(signals.ending)
            # Should a step never end.
            timer = threading.Timer(ENDS_WITHIN_S, os._exit, (code or EXIT_SOME_FAILED,))
            timer.daemon = True
            timer.start()
            args.has_hung_workers = llm.snapshot().engine.has_hung_r_workers
    return code


def _serve(
    args: argparse.Namespace, llm: LLM, http: HttpProcess, options: ServeOptions, signals: Signals
) -> Ending:
    from fastdecode.engine.instances.client import status_of
    from fastdecode.engine.instances.server import RequestLimits
    from fastdecode.measure.status_file import engine_status, status_file
    from fastdecode.server.link import Keys, Ready
    from fastdecode.server.serving import Bridge, Serving

    limits = RequestLimits(llm.facts.vocab_size, llm.facts.max_model_len)
    bridge = Bridge(llm.service, http.channel, limits, status_of, options.write_timeout_s)
    kv_tokens = llm.facts.num_kv_blocks * llm.config.r_part.block_size
    bridge.send(Ready(kv_tokens))
    bridge.start()
    bridge.is_open.wait(options.write_timeout_s)
    tell(
        f"{COMMAND}: ready at {http.address}; {kv_tokens} tokens of KV cache, "
        f"{llm.facts.num_r_workers} R-worker(s)"
    )

    def reload() -> None:
        try:
            keys = key_hashes(options)
        except FastDecodeError as error:
            say(f"the keys stay as they are: {error}")
        else:
            bridge.send(Keys(keys))
            say(f"accepted keys: {len(keys) or 'none is needed'}")

    def say(text: str) -> None:
        tell(f"{COMMAND}: {text}")

    look = engine_status(args.model, llm.service, lambda: llm.stats)
    with status_file(args.status, "serve", look, tell):
        return Serving(llm.service, bridge, signals, reload, say).run(options.drain_timeout_s)


def _opening(
    args: argparse.Namespace, config: EngineConfig, options: ServeOptions, keys: tuple[str, ...]
) -> Opening:
    from fastdecode.core.model.checkpoint import open_checkpoint
    from fastdecode.core.model.identity import identify
    from fastdecode.server.link import Opening

    spec = open_checkpoint(args.model, config.s_part.load_format).spec(
        max_model_len=config.s_part.max_model_len
    )
    return Opening(
        model=args.model,
        options=asdict(options),
        sampling=sampling_given(args),
        max_model_len=identify(config, spec).max_model_len,
        vocab_size=spec.vocab_size,
        expected_output_tokens=args.expected_output_tokens,
        keys=keys,
        keeping=asdict(read_options(args, Keeping)),
        no_reuse=why_no_reuse(config),
        model_defaults=model_defaults(args),
    )
