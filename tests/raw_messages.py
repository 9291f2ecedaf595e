"""Messages whose JSON fields are any bytes: as an instance or a controller would send them
that means harm. On the wire they look like the messages that they are named after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire import codec
from fastdecode.wire.instances.messages import Deltas, Submit
from fastdecode.wire.opcodes import OPCODES

Raw = Annotated[NDArray[np.uint8], "N"]


@dataclass(frozen=True, eq=False)
class RawSubmit:
    requests: Raw
    every_step: bool = True


@dataclass(frozen=True, eq=False)
class RawDeltas:
    deltas: Raw


def raw(said: bytes) -> Any:
    return np.frombuffer(said, np.uint8)


for _raw, _kind in ((RawSubmit, Submit), (RawDeltas, Deltas)):
    codec._BY_KIND[_raw] = codec._Layout(_raw, OPCODES[_kind])  # type: ignore[index,arg-type]
