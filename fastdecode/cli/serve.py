"""``fastdecode serve``: an OpenAI-compatible server.

Exit codes: 0 it was asked to stop, and answered all running requests; 2 options, or the model
directory; 3 it was asked to stop, and some requests were cut off; 4 the engine or its R-workers
were lost; 5 the HTTP process was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import (
    EXIT_SOME_FAILED,
    EXIT_WORKERS_LOST,
    add_engine_options,
    add_exit_code_option,
    add_log_level_option,
    add_options,
    add_sampling_options,
    add_status_option,
    check_options,
    engine_options,
    load_engine,
    model_defaults,
    read_options,
    sampling_given,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.cli.r_worker import serve_if_r_rank
from fastdecode.conversations.conversations import Keeping
from fastdecode.conversations.turns import why_no_reuse
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import FastDecodeError, imports_for
from fastdecode.core.files import check_writable
from fastdecode.core.host.interrupts import Interrupted, interrupt
from fastdecode.jobs.stopping import stop_signals
from fastdecode.server.options import ServeOptions, key_hashes
from fastdecode.wire.mpi import joining, launcher

if TYPE_CHECKING:
    from types import FrameType

    from fastdecode.engine.llm import LLM
    from fastdecode.engine.setup.launch import RunningEngine
    from fastdecode.server.link import Opening
    from fastdecode.server.serving import Ending, HttpProcess, SignalCounts

COMMAND = "fastdecode serve"
EXPECTED_OUTPUT_TOKENS = 256
LENGTH_QUANTILE = 0.9
EXIT_HTTP_LOST = 5
ENDS_WITHIN_S = 60.0
"""Longest time for the step in flight once all requests are answered."""


def add_serve(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="answer OpenAI's API over HTTP",
        description="Serve /v1/completions, /v1/chat/completions and /v1/responses, whole and "
        "as streams, to any client of OpenAI's API. Stops upon SIGTERM or Ctrl-C once what runs "
        "is done; a second time at once.",
    )
    parser.set_defaults(run=run_serve)
    add_model(parser)
    server = parser.add_argument_group("server")
    add_options(server, ServeOptions)
    add_status_option(server)
    add_engine_options(parser, {
        "length_quantile": str(LENGTH_QUANTILE),
        "expected_output_tokens": str(EXPECTED_OUTPUT_TOKENS),
    })  # fmt: skip
    add_options(parser.add_argument_group("conversations"), Keeping)
    add_sampling_options(parser, "requests", has_chats=True)
    add_exit_code_option(parser)
    add_log_level_option(parser)


def run_serve(
    args: argparse.Namespace,
    serve: Callable[[argparse.Namespace, StopsWhileStarting], int] | None = None,
) -> int:
    """Serve until asked to stop. Return the exit code. ``serve``: replaces serving in tests."""
    from fastdecode.core.host.logs import keep_traces_out

    stops = StopsWhileStarting()
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_signals(stops.hear))
        if args.log_level != "debug":
            stack.callback(keep_traces_out())
        code = (serve or _serve_or_stop)(args, stops)
        if stops.num or stops.is_over:
            # Keep the handlers while MPI is left: signals change nothing any more.
            stops.kept = stack.pop_all()
    return code


class StopsWhileStarting:
    """Handles signals that ask to stop before anything is served, and after the end.

    The first one raises Interrupted, or is only counted where Python swallows the exception (in
    a destructor or a callback). The third one ends the process.

    Args:
        leave: Ends the process immediately.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self.num = 0
        self.is_over = False
        """True once all requests are answered. Nothing is left to stop."""
        self.kept: contextlib.ExitStack | None = None
        """Holds the signal handlers until the process ends."""
        self._leave = leave
        self._is_put_off = False

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Delay interrupts: a C++ library that is interrupted during an import may end the
        process.

        Raises:
            Interrupted: If a signal arrived meanwhile.
        """
        self._is_put_off = True
        try:
            yield
        finally:
            self._is_put_off = False
        if self.num:
            raise Interrupted

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.is_over:
            return
        self.num += 1
        if self.num > 2:
            self._leave(EXIT_SOME_FAILED)
        elif self.num == 1 and not self._is_put_off:
            interrupt(number, frame)


def _serve_or_stop(args: argparse.Namespace, stops: StopsWhileStarting) -> int:
    from fastdecode.server.serving import SignalCounts

    _expect_lengths(args)
    check_options(args)
    options = read_options(args, ServeOptions)
    if args.status is not None:
        check_writable(args.status, "status")
    keys = key_hashes(options)
    counts = SignalCounts()
    try:
        with _reloads_noted(counts):
            return _start(args, options, keys, counts, stops)
    except KeyboardInterrupt:
        if counts.ending is not None:
            raise
    tell(f"{COMMAND}: asked to stop while it started; it has answered nothing")
    # The other ranks of an MPI job wait for our goodbye.
    joining.joined_at_last(wanted=True)
    return 0


def _start(
    args: argparse.Namespace,
    options: ServeOptions,
    keys: tuple[str, ...],
    counts: SignalCounts,
    stops: StopsWhileStarting,
) -> int:
    """Start, and serve until asked to stop. Return the exit code.

    Raises:
        KeyboardInterrupt: If asked to stop while it starts.
    """
    from fastdecode.server.serving import HttpProcess

    with contextlib.ExitStack() as stack:
        http: HttpProcess | None = None
        if launcher.launched_rank() in (None, 0):
            with stops.put_off(), imports_for(COMMAND):
                for name in ("httptools", "prometheus_client", "starlette", "uvicorn"):
                    import_module(name)  # the other process needs it; say so here
            http = HttpProcess(_opening(args, options, keys))
            stack.callback(http.close)
        serve_if_r_rank(args, engine_options(args))
        assert http is not None, "rank 0 has it, and others don't return"
        tell(f"{COMMAND}: listening at {http.address}; loading")
        with stops.put_off(), imports_for(f"{COMMAND} (an S-worker)"):
            load_engine(args)
            from fastdecode.engine.llm import LLM
        # Requests bring the defaults of generation_config.json.
        with LLM(
            args.model, progress=tell, generation_config="ignore", **engine_options(args)
        ) as llm:
            stack.enter_context(stops_noted(counts))
            counts.num_stops = max(counts.num_stops, min(stops.num, 1))
            counts.ending = _serve(args, llm, http, options, counts)
            stops.is_over = True
            code = exit_code(counts.ending)
            _end_later(code)  # should a step never end
            args.has_hung_workers = llm.snapshot().engine.has_hung_r_workers
    return code


def _serve(
    args: argparse.Namespace,
    llm: LLM,
    http: HttpProcess,
    options: ServeOptions,
    counts: SignalCounts,
) -> Ending:
    from fastdecode.engine.instances.engine_server import RequestLimits
    from fastdecode.measure.status_file import RunningEngineStatus, StatusFile
    from fastdecode.server.link import Keys, Ready
    from fastdecode.server.serving import Bridge, Serving

    limits = RequestLimits(llm.facts.vocab_size, llm.facts.max_model_len)
    bridge = Bridge(llm.service, http.channel, limits, _figures, options.write_timeout_s)
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
            say(f"keys that let in: {len(keys) or 'none is needed'}")

    def say(text: str) -> None:
        tell(f"{COMMAND}: {text}")

    with StatusFile(args.status, "serve", RunningEngineStatus.of(llm), tell):
        return Serving(llm.service, bridge, counts, reload, say).run(options.drain_timeout_s)


def _figures(running: RunningEngine) -> dict[str, Any]:
    from fastdecode.engine.instances.status_report import status_to_json

    return status_to_json(running.engine.stats, running.engine.figures())


def _expect_lengths(args: argparse.Namespace) -> None:
    """Reserve room for expected lengths: without max_tokens a request's limit is the model's."""
    if args.length_quantile is None:
        args.length_quantile = LENGTH_QUANTILE
    if args.expected_output_tokens is None:
        args.expected_output_tokens = EXPECTED_OUTPUT_TOKENS


def _opening(args: argparse.Namespace, options: ServeOptions, keys: tuple[str, ...]) -> Opening:
    """
    Raises:
        ModelError, ConfigError: If the model directory can't be used.
    """
    from fastdecode.core.model.checkpoint import open_checkpoint
    from fastdecode.core.model.identity import identify
    from fastdecode.server.link import Opening

    config = EngineConfig.of(args.model, **engine_options(args))
    spec = open_checkpoint(args.model, config.s_part.load_format).spec(
        max_model_len=config.s_part.max_model_len
    )
    return Opening(
        model=args.model,
        options=asdict(options),
        sampling=sampling_given(args),
        max_model_len=identify(config, spec).max_model_len,
        vocab_size=spec.vocab_size,
        expected_output_tokens=args.expected_output_tokens or EXPECTED_OUTPUT_TOKENS,
        keys=keys,
        keeping=asdict(read_options(args, Keeping)),
        no_reuse=why_no_reuse(config),
        model_defaults=model_defaults(args),
    )


def _end_later(code: int) -> None:
    """End this process after a while, should a step never end."""
    timer = threading.Timer(ENDS_WITHIN_S, os._exit, (code or EXIT_SOME_FAILED,))
    timer.daemon = True
    timer.start()


def exit_code(ending: Ending) -> int:
    """Return the exit code for the end of a server."""
    from fastdecode.server.serving import Ending

    codes = {
        Ending.ALL_ANSWERED: 0,
        Ending.SOME_CUT: EXIT_SOME_FAILED,
        Ending.ENGINE_LOST: EXIT_WORKERS_LOST,
        Ending.HTTP_LOST: EXIT_HTTP_LOST,
    }
    return codes[ending]


@contextlib.contextmanager
def stops_noted(counts: SignalCounts, leave: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Let signals ask the server to stop. ``leave``: ends the process immediately."""

    def stop(number: int, frame: FrameType | None) -> None:
        counts.num_stops += 1
        if counts.ending is not None:  # the engine takes long to close
            leave(exit_code(counts.ending))
        elif counts.num_stops > 2:  # something hangs
            leave(EXIT_SOME_FAILED)

    with stop_signals(stop):
        yield


@contextlib.contextmanager
def _reloads_noted(counts: SignalCounts) -> Iterator[None]:
    """Let SIGHUP ask the server to read its keys again, once it has started."""

    def reload(number: int, frame: FrameType | None) -> None:
        counts.num_reloads += 1

    before = signal.signal(signal.SIGHUP, reload)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
