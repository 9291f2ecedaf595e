"""``fastdecode instance``: a whole engine that runs what a controller gives it.

Exit codes: 0 it was asked to end; 2 options, or the model directory; 4 its R-workers were lost,
or its engine broke down.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from fastdecode.cli.options import (
    EXIT_WORKERS_LOST,
    add_engine_options,
    add_options,
    add_status_option,
    engine_options,
    read_options,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.config.options import option
from fastdecode.core.errors import imports_for
from fastdecode.core.files import check_writable
from fastdecode.core.host.processes import interrupt
from fastdecode.jobs.stopping import stop_signals

if TYPE_CHECKING:
    from fastdecode.engine.instances.instance_server import InstanceServer

COMMAND = "fastdecode instance"
ANY_PORT = "tcp://127.0.0.1:*"


@dataclass(frozen=True)
class InstanceOptions:
    """What an instance is for, and where it is reached."""

    role: str = option(
        InstanceRole.BOTH.value,
        "what controllers give it: prompts, requests whose prompts others have run, or both; "
        "they may change that",
        choices=tuple(role.value for role in InstanceRole),
    )
    bind: str = option(
        ANY_PORT,
        f"where controllers connect (default: {ANY_PORT}, any free port)",
        metavar="ADDRESS",
    )
    export: str | None = option(
        None,
        "where other instances' R-workers fetch prompts from the first of its own; the next "
        "ones' ports follow upon it (default: free ports of the host of --bind)",
        metavar="ADDRESS",
    )
    name: str | None = option(
        None, "what to be called in logs; default: the host and port", metavar="NAME"
    )


def add_instance(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Load a model, and run what a controller gives this process: generate, "
        "run-batch or serve with --instances. Serves one controller at a time, and then the next. "
        "Stops upon SIGTERM or Ctrl-C."
    )
    parser.set_defaults(run=_instance)
    add_model(parser)
    group = parser.add_argument_group("instance")
    add_options(group, InstanceOptions)
    add_status_option(group)
    add_engine_options(parser)


@stop_signals(interrupt)  # until it serves
def _instance(args: argparse.Namespace) -> int:
    own, options = read_options(args, InstanceOptions), engine_options(args)
    key = options["key"]
    if not options["r_worker_addresses"]:  # it is for R-workers that connect to this process
        options["key"] = None
    config = EngineConfig.of(args.model, **options)
    with imports_for(f"{COMMAND} (an S-worker)"):
        from fastdecode.engine.instances.process import InstancePlace, serve_instance
        from fastdecode.measure.status_file import RunningEngineStatus, status_file
    if args.status is not None:
        check_writable(args.status, "status")
    name = own.name or f"{socket.gethostname()} {own.bind.rpartition(':')[2]}"
    place = InstancePlace(InstanceRole(own.role), own.bind, own.export, key, name)

    def listening(address: str, serving: InstanceServer) -> None:
        def end(number: int, frame: FrameType | None) -> None:
            serving.end()

        stops.enter_context(stop_signals(end))
        status = RunningEngineStatus(args.model, serving.service, lambda: serving.stats)
        stops.enter_context(status_file(args.status, "instance", status, tell))
        print(f"instance {name} ({own.role}) listens at {address}", flush=True)

    with contextlib.ExitStack() as stops:
        broken = serve_instance(config, place, tell, listening)
    if broken is None:
        return 0
    tell(f"{COMMAND}: the engine broke down: {broken}")
    return EXIT_WORKERS_LOST
