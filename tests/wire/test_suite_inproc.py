"""The transport suite, in process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from puppet import LocalPuppet
from transport_suite import MakeStar, TransportSuite

from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import FromRWorker, ToRWorker


class TestInproc(TransportSuite):
    @pytest.fixture
    def star(self) -> MakeStar:
        def make(num_peers: int) -> SimpleNamespace:
            hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
            names = [f"worker {i}" for i in range(num_peers)]
            ends = [
                connect(hub, "the S-worker", InprocHub[FromRWorker, ToRWorker](), name)[1]
                for name in names
            ]
            return SimpleNamespace(hub=hub, peers=[LocalPuppet(end) for end in ends], names=names)

        return make
