"""A prompt stage as a writer: every layer goes to the member that keeps it, once, and
a group is lost with any of its members."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from values import replace

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import HeadShare, Shard
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.writers import WriterMembers, WriterPool, WriterRelay, members_of
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import Attend, AttendResult, BeginStep, Failed, StorePrompt
from fastdecode.wire.stages import ColumnLost

NUM_COLUMNS = 2
STAGES = (range(2), range(2, 5))
"""Of tokens; the prompt stage has layers 1 to 3."""
NO_O = np.zeros((0, 4, 4), np.float32)
V, W = HolderId(0), HolderId(1)


def cut(num_layers: int, ends: set[int]) -> list[range]:
    bounds = sorted({0, num_layers, *ends})
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


@given(st.integers(1, 40), st.data())
def test_all_layers_of_all_stages_are_written_once(num_layers: int, data: st.DataObject) -> None:
    """Whatever the cuts."""
    ends = st.sets(st.integers(1, num_layers))
    of_tokens, of_prompts = (cut(num_layers, data.draw(ends)) for _ in range(2))
    written = []
    for layers in of_prompts:
        shards = {x: Shard(layers=each) for x, each in members_of(layers, of_tokens).items()}
        for layer in range(len(layers)):
            (stage,) = [x for x, shard in shards.items() if shard.has_layer(layer)]
            kept = shards[stage].layers
            assert kept is not None and len(kept) == len(of_tokens[stage])
            assert of_tokens[stage][layer - kept.start] == layers[layer]
            written.append((stage, layer - kept.start))
    assert written == [(i, x) for i, each in enumerate(of_tokens) for x in range(len(each))]


class Peers:
    """A prompt stage with layers 1, 2 and 3, and the other ends of its connections:
    R-workers of two token stages in two columns, and the first stage."""

    def __init__(
        self,
        num_columns: int = NUM_COLUMNS,
        *,
        at_addresses: bool = False,
        absent: Mapping[int, WorkerError] | None = None,
    ) -> None:
        hub: InprocHub[Any, Any] = InprocHub()
        self.hub: Any = hub
        self.r_workers: dict[tuple[int, int], InprocConnection[Any, Any]] = {}
        for stage in range(2):
            for column in range(NUM_COLUMNS):
                end: InprocHub[Any, Any] = InprocHub()
                name = f"R-worker s{stage}-r{column}"
                self.r_workers[stage, column] = connect(hub, "the prompt stage", end, name)[1]
        here, self.stage = connect(hub, "the prompt stage", InprocHub(), "the first stage")
        self.links = StageLinks({0: here}, is_asked=True)
        layers = members_of(range(1, 4), STAGES)
        members = WriterMembers(
            hub, 60.0, 60.0, stages=self.links, written=layers, num_columns=num_columns,
            at_addresses=Addresses(self) if at_addresses else None, absent=absent,
        )  # fmt: skip
        members.sessions = (70, 71)
        self.pool = WriterPool(members, layers)
        self.reports = WriterRelay(self.pool)
        if num_columns == NUM_COLUMNS:
            self.reports.regroup(rows(*AT_HOME))

    def write(self, column: HolderId, layer: int) -> Attend:
        counts = np.array([0], np.int32), np.array([3], np.int32)
        begin = BeginStep(8, 4, np.array([5]), *counts, *counts)
        kv = np.full((3, 2, 4), layer, np.float32)
        attend = Attend(8, 4, layer, NO_O, kv, kv + 1)
        if not layer:
            self.pool.send(column, begin)
        self.pool.send(column, attend)
        return attend

    def answer(self, stage: int, column: int) -> StorePrompt:
        """What an R-worker got, which it answers."""
        got: StorePrompt = self.r_workers[stage, column].receive(1.0)
        answer = AttendResult(got.step, got.lane, got.layer, NO_O, None, 0.5)
        self.r_workers[stage, column].send(answer)
        return got

    def receive(self) -> Any:
        return self.pool.receive(most_s=1.0)

    def reported(self) -> list[Any]:
        """What the first stage has heard."""
        return list(iter(self.stage.poll, None))


def test_layers_go_to_the_members_that_keep_them() -> None:
    peers = Peers()
    sent = [peers.write(W, layer) for layer in range(3)]
    late = [peers.answer(1, 1) for _ in range(2)]
    first = peers.answer(0, 1)
    got = [first, *late]
    where = [(70, 1, 1), (71, 0, 1), (71, 1, 1)]
    assert [(one.session, one.layer, one.holder) for one in got] == where
    for one, attend in zip(got, sent, strict=True):
        assert one.k is attend.k and one.v is attend.v, "as it was, and lent"
        counts = one.sequence_ids.tolist(), one.num_past.tolist(), one.num_new.tolist()
        assert counts == ([5], [0], [3])
    answers = [peers.receive() for _ in range(3)]
    assert sorted((index, answer.layer) for index, answer in answers) == [(1, 0), (1, 1), (1, 2)]


def test_members_that_share_heads_get_their_heads() -> None:
    """All of them answer for the group."""
    shares = [HeadShare(slice(i, i + 1), slice(2 * i, 2 * i + 2)) for i in range(2)]
    kv = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    ids, counts = np.array([5]), np.array([3], np.int32)
    stored = StorePrompt(0, 8, 4, 2, ids, counts, counts, kv, kv + 1, 0)
    parts = [stored.part(Shard(share)) for share in shares]
    assert np.array_equal(np.concatenate([part.k for part in parts], axis=1), kv)
    assert np.array_equal(np.concatenate([part.v for part in parts], axis=1), kv + 1)
    seconds = [AttendResult(8, 4, 2, NO_O, None, s) for s in (0.5, 0.75)]
    assert stored.join(seconds).compute_s == 0.75


def test_the_first_stage_is_heard_beside_them() -> None:
    peers = Peers()
    peers.stage.send("an order")
    assert peers.receive() is None and peers.links.take_heard() == [(0, "an order")]
    peers.stage.close()
    with pytest.raises(WorkerError, match="the first stage"):
        peers.receive()


def test_a_group_is_lost_with_any_of_its_members_once() -> None:
    peers = Peers()
    peers.write(V, 0)
    peers.write(W, 0)
    peers.write(V, 1)
    peers.r_workers[1, 0].close()
    assert peers.receive() is None
    ((column, error),) = peers.pool.take_losses()
    assert column == V and "s1-r0" in str(error)
    assert [(lost.stage, lost.column) for lost in peers.reported()] == [(1, 0)]
    peers.answer(0, 0)
    peers.answer(0, 1)
    assert peers.receive()[0] == W, "nobody waits for the lost group"
    peers.write(V, 2)
    assert not peers.pool.take_losses() and not peers.reported()


def test_a_member_that_owes_nothing_may_leave() -> None:
    """As at the end of a job; its loss is noticed when it is sent something."""
    peers = Peers()
    peers.r_workers[0, 1].close()
    assert peers.pool.receive(most_s=0.01) is None
    assert not peers.pool.take_losses() and not peers.reported()
    peers.write(W, 0)
    assert [column for column, _ in peers.pool.take_losses()] == [W]
    assert [(lost.stage, lost.column) for lost in peers.reported()] == [(0, 1)]


@pytest.mark.parametrize("wrong", [{"layer": 0}, {"layer": 7}, {"step": 9}])
def test_a_member_that_answers_for_another_layer_is_lost(wrong: dict[str, int]) -> None:
    peers = Peers()
    peers.write(V, 0)
    answer = AttendResult(8, 4, 1, NO_O, None, 0.5)
    peers.r_workers[0, 0].send(replace(answer, **wrong))  # type: ignore[arg-type]
    assert peers.receive() is None
    ((column, error),) = peers.pool.take_losses()
    assert column == V and "was due" in str(error)


def test_one_that_was_not_there_to_begin_with_is_reported() -> None:
    peers = Peers(absent={1: WorkerError("can't reach it", code="worker_lost")})
    ((stage, lost),) = [(told.stage, told) for told in peers.reported()]
    assert (stage, lost.column, lost.code, lost.num_replaced) == (0, 1, "worker_lost", 0)
    assert not peers.reported()


def test_last_words_are_passed_on() -> None:
    peers = Peers()
    peers.write(W, 0)
    peers.write(W, 1)
    peers.r_workers[1, 1].send(Failed("s1-r1", "kernel_failed", "it is too hot"))
    assert peers.receive() is None
    (lost,) = peers.reported()
    assert isinstance(lost, ColumnLost) and (lost.stage, lost.column) == (1, 1)
    assert lost.code == "kernel_failed" and "it is too hot" in lost.message


def test_the_first_stage_has_no_orders_for_r_workers() -> None:
    with pytest.raises(ProtocolError, match="StorePrompt"):
        Peers().reports.obey(StorePrompt.__new__(StorePrompt))


def rows(*members: tuple[int, int, int, int], num_replaced: int = 0) -> NDArray[np.int32]:
    """(column, stage, name, worker) of each, with all heads."""
    return np.array([(*member, num_replaced, 0, 0) for member in members], np.int32)


AT_HOME = [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 1), (1, 1, 1, 1)]


def test_a_group_goes_on_with_a_member_at_another_r_worker() -> None:
    """Under its own name. What was asked before is forgotten."""
    peers = Peers()
    peers.write(V, 0)
    peers.write(V, 1)
    peers.r_workers[1, 0].close()
    assert peers.receive() is None and [x for x, _ in peers.pool.take_losses()] == [V]
    moved = [(0, 0, 0, 0), (0, 1, 0, 1), *AT_HOME[2:]]
    assert peers.reports.regroup(rows(*moved)) == [V]
    assert peers.reports.regroup(rows(*moved)) == []
    assert V not in peers.pool.lost
    peers.write(V, 0)
    peers.write(V, 1)
    got = peers.answer(1, 1)
    assert (got.layer, got.holder, got.session) == (0, 0, 71)
    assert peers.receive()[0] == V
    peers.answer(0, 0)
    assert peers.pool.receive(most_s=0.01) is None, "the answer to what is forgotten"
    peers.answer(0, 0)
    assert peers.receive()[0] == V


def test_a_group_that_shares_heads_goes_on_with_the_members_that_are_left() -> None:
    """The first stage's two R-workers are one group; the other has all heads then."""
    peers = Peers(num_columns=1)
    both = [(0, 0, 0, 0, 0, 0, 1), (0, 0, 1, 1, 0, 1, 1)]
    assert peers.reports.regroup(np.array(both, np.int32)) == [V]
    peers.write(V, 0)
    for column in range(2):
        assert peers.answer(0, column).k.shape == (3, 1, 4)
    assert peers.receive()[0] == V
    peers.r_workers[0, 0].close()
    peers.write(V, 0)
    assert [x for x, _ in peers.pool.take_losses()] == [V]
    assert [(lost.stage, lost.column) for lost in peers.reported()] == [(0, 0)]
    assert peers.reports.regroup(np.array([(0, 0, 1, 1, 0, 0, 2)], np.int32)) == [V]
    assert peers.answer(0, 1).k.shape == (3, 1, 4), "what is forgotten"
    peers.write(V, 0)
    assert peers.answer(0, 1).k.shape == (3, 2, 4)
    assert peers.receive()[0] == V


class Addresses:
    """At each of which another process may listen."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._hub = peers.hub

    @property
    def connections(self) -> Any:
        return self._hub.connections

    def reconnect(self, index: int) -> Any:
        here, there = connect(InprocHub(), "the prompt stage", InprocHub(), "the replacement")
        self._peers.r_workers[divmod(index, NUM_COLUMNS)] = there  # type: ignore[index]
        return here

    def replace(self, index: int, connection: Any) -> None:
        self._hub.connections[index] = connection


def test_a_member_is_written_at_its_address_once_another_process_is_there() -> None:
    """Which process that is the first stage knows. A loss is reported with it."""
    peers = Peers(at_addresses=True)
    peers.write(V, 0)
    peers.r_workers[0, 0].close()
    assert peers.receive() is None and [x for x, _ in peers.pool.take_losses()] == [V]
    assert [(lost.column, lost.num_replaced) for lost in peers.reported()] == [(0, 0)]
    peers.write(V, 0)
    replaced = np.concatenate((rows(AT_HOME[0], num_replaced=1), rows(*AT_HOME[1:])))
    assert peers.reports.regroup(replaced) == [V]
    assert not peers.pool.gone
    peers.write(V, 0)
    here = peers.r_workers[0, 0]
    assert here.receive(1.0).holder == 0 and here.poll() is None, "nothing of before"
    here.close()
    peers.write(V, 0)
    assert [x for x, _ in peers.pool.take_losses()] == [V]
    assert [(lost.column, lost.num_replaced) for lost in peers.reported()] == [(0, 1)]


def test_a_step_is_not_done_while_the_rest_of_a_lost_group_stores_it() -> None:
    """Else they are greeted again, and what was on its way comes behind the greeting."""
    peers, step = Peers(), SimpleNamespace(settled=True)
    is_stored: Any = peers.reports.is_stored
    peers.write(V, 0)
    peers.write(V, 1)
    peers.r_workers[1, 0].close()
    assert peers.receive() is None and [x for x, _ in peers.pool.take_losses()] == [V]
    assert not is_stored(step)
    peers.answer(0, 0)
    assert peers.receive() is None and is_stored(step)
    assert not is_stored(SimpleNamespace(settled=False))


def test_members_that_cannot_be_are_refused() -> None:
    pool = Peers().pool
    for wrong in (rows((0, 0, 2, 0)), rows((0, 0, 0, 2)), rows((-1, 0, 0, 0)), np.zeros((1, 5))):
        with pytest.raises(ProtocolError, match="members that can't be"):
            pool.regroup(wrong.astype(np.int32))
