"""One machine of a pipeline, as ``fastdecode plan`` is given it: a file of measured times, or a
model on a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode.cli.size import add_hardware_file, read_part_of_setup
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from cost_model.disaggregate.profile import MachineProfile

SIZES = tuple(1 << i for i in range(9))
"""Of microbatches, in sequences, that are looked at where times come from a GPU."""


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The options, which stand in for times that are typed in."""
    group = parser.add_argument_group("a machine's times: from a file, or of a model on a GPU")
    add = group.add_argument
    add("--profile", type=Path, metavar="FILE", help="one machine's times, JSON")
    add("--model", metavar="MODEL", help="a name, a config.json, or a model directory")
    add("--gpu", metavar="G", help="of a machine: name, or profile.json of `calibrate s`")
    add(
        "--dtype",
        default="auto",
        help="weights and activations; auto is a measured --gpu's, else the checkpoint's",
    )
    add("--kv-dtype", default="auto", help="KV cache; auto is --dtype")
    add_hardware_file(group)


def is_machine_given(args: argparse.Namespace) -> bool:
    return args.profile is not None or args.model is not None or args.gpu is not None


def read_machine(
    args: argparse.Namespace, prompt: int, output: int, sizes: Sequence[int] = SIZES
) -> tuple[MachineProfile, float | None]:
    """A machine's times, and the bytes a second that its GPU gets from the host's memory; None:
    not known.

    Args:
        prompt, output: tokens of a sequence.

    Raises:
        ConfigError: no machine is given, or two.
    """
    from cost_model.disaggregate.profile import machine_on, read_machine_profile

    if args.profile is not None:
        if args.model is not None or args.gpu is not None:
            raise ConfigError("give --profile, or --model and --gpu, not both")
        return read_machine_profile(args.profile), None
    if args.model is None or args.gpu is None:
        raise ConfigError("how long does a machine take? Give --profile, or --model and --gpu")
    system = read_part_of_setup(args, prompt, output).system()
    return machine_on(system, sizes), system.s.host_link_bytes_per_s
