"""The commands of ``fastdecode``: module and one line of help. None is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True)
class Command:
    """One command."""

    module: str
    adder: str
    """Name of the module's function that adds the command to the parser's subcommands."""
    help: str
    """The same as that of the command's parser, so that the list of commands imports none."""

    def add(self, commands: Any) -> None:
        """Import the command, and add it with all of its options."""
        getattr(import_module(self.module), self.adder)(commands)


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType({
    name: Command(f"fastdecode.cli.{module}", f"add_{name.replace('-', '_')}", text)
    for name, module, text in (
        ("generate", "generate", "complete every prompt of a JSON Lines file"),
        ("run-batch", "run_batch",
         "answer a file of OpenAI batch lines; can be interrupted and resumed"),
        ("merge", "merge", "join the answers of a job's shards, in the order of the input"),
        ("serve", "serve", "answer OpenAI's API over HTTP"),
        ("bench-serve", "bench.serve", "measure a server of OpenAI's API under a load"),
        ("size", "size", "plan: which batch and how many CPU sockets keep a GPU busy"),
        ("plan", "plan", "plan: machines for prompts and for tokens, and whether it pays"),
        ("calibrate", "calibrate", "measure this machine, to plan with `fastdecode size`"),
        ("bench", "bench.plan",
         "run a plan, or its scaled-down twin here: predicted against measured"),
        ("simulate", "simulate", "compare schedules on a trace, without hardware"),
        ("r-worker", "r_worker", "serve as an R-worker, in an MPI job or at an address"),
        ("instance", "instance",
         "run one engine as an instance: it prefills or decodes for another process"),
        ("launch", "launch",
         "run generate, run-batch, serve, doctor or calibrate over MPI on a list of hosts"),
        ("top", "top", "watch a running command or server"),
        ("plot", "plot", "draw a run from its trace"),
        ("cache", "cache",
         "show, verify or clear the conversations or KV blocks that are kept in a directory"),
        ("doctor", "doctor",
         "check MPI, versions, cores, memory and network of this host and its R-workers"),
    )
})  # fmt: skip
