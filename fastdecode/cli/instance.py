"""``fastdecode instance``: a whole engine that runs what a controller gives it.

Exit codes: 0 it was asked to end; 2 options, or the model directory; 4 its
R-workers were lost, or its engine broke down.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import (
    EXIT_WORKERS_LOST,
    add_engine_options,
    add_log_level_option,
    add_status_option,
    engine_options,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import imports_for
from fastdecode.core.files import check_writable
from fastdecode.core.host.interrupts import interrupt
from fastdecode.jobs.stopping import stop_signals

if TYPE_CHECKING:
    from fastdecode.engine.instances.instance_server import InstanceServer

COMMAND = "fastdecode instance"
ANY_PORT = "tcp://127.0.0.1:*"


def add_instance(commands: Any) -> None:
    """Add the subcommand to the parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "instance",
        help="run one engine as an instance: it prefills or decodes for another process",
        description="Load a model, and run what a controller gives this process: generate, "
        "run-batch or serve with --instances. Serves one controller at a time, and then the next. "
        "Stops upon SIGTERM or Ctrl-C.",
    )
    parser.set_defaults(run=_instance)
    add_model(parser)
    group = parser.add_argument_group("instance")
    group.add_argument(
        "--role", choices=[role.value for role in InstanceRole], default=InstanceRole.BOTH.value,
        help="what controllers give it: prompts, requests whose prompts others have run, or both; "
        "they may change that (default: both)",
    )  # fmt: skip
    group.add_argument(
        "--bind", default=ANY_PORT, metavar="ADDRESS",
        help=f"where controllers connect (default: {ANY_PORT}, any free port)",
    )  # fmt: skip
    group.add_argument(
        "--export", metavar="ADDRESS",
        help="where other instances' R-workers fetch prompts from the first of its own; the next "
        "ones' ports follow upon it (default: free ports of the host of --bind)",
    )  # fmt: skip
    group.add_argument(
        "--name", metavar="NAME", help="what to be called in logs; default: the host and port"
    )
    add_status_option(group)
    add_engine_options(parser)
    add_log_level_option(parser)


@stop_signals(interrupt)  # until it serves
def _instance(args: argparse.Namespace) -> int:
    options = engine_options(args)
    key = options["key"]
    if not options["r_worker_addresses"]:  # it is for R-workers that connect to this process
        options["key"] = None
    config = EngineConfig.of(args.model, **options)
    with imports_for(f"{COMMAND} (an S-worker)"):
        from fastdecode.engine.instances.process import InstancePlace, serve_instance
        from fastdecode.measure.status_file import RunningEngineStatus, StatusFile
    if args.status is not None:
        check_writable(args.status, "status")
    name = args.name or f"{socket.gethostname()} {args.bind.rpartition(':')[2]}"
    place = InstancePlace(InstanceRole(args.role), args.bind, args.export, key, name)

    def listening(address: str, serving: InstanceServer) -> None:
        def end(number: int, frame: FrameType | None) -> None:
            serving.end()

        stops.enter_context(stop_signals(end))
        status = RunningEngineStatus(args.model, serving.service, lambda: serving.stats)
        stops.enter_context(StatusFile(args.status, "instance", status, tell))
        print(f"instance {name} ({args.role}) listens at {address}", flush=True)

    with contextlib.ExitStack() as stops:
        broken = serve_instance(config, place, tell, listening)
    if broken is None:
        return 0
    tell(f"{COMMAND}: the engine broke down: {broken}")
    return EXIT_WORKERS_LOST
