"""Messages whose JSON fields are any bytes: as an instance or a controller would send them
that means harm. On the wire they look like the messages that they are named after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire import codec
from fastdecode.wire.instances.messages import Deltas, StatusReport, Submit
from fastdecode.wire.opcodes import OPCODES

Raw = Annotated[NDArray[np.uint8], "N"]


@dataclass(frozen=True, eq=False)
class RawSubmit:
    requests: Raw
    every_step: bool = True


@dataclass(frozen=True, eq=False)
class RawDeltas:
    deltas: Raw


@dataclass(frozen=True, eq=False)
class RawReport:
    num_steps: int
    stepped_s: float | None
    longest_step_s: float
    num_unfinished: int
    num_running: int
    num_r_workers: int
    num_live_r_workers: int
    has_hung_r_workers: bool
    state: str
    error: str | None
    figures: Raw


def raw(said: bytes) -> Any:
    return np.frombuffer(said, np.uint8)


for _raw, _kind in ((RawSubmit, Submit), (RawDeltas, Deltas), (RawReport, StatusReport)):
    codec._BY_KIND[_raw] = codec._Layout(_raw, OPCODES[_kind])  # type: ignore[index,arg-type]
