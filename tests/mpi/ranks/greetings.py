"""Two R-workers that read each other, over and over, while the first of three ranks waits."""

from __future__ import annotations

import contextlib

import numpy as np

from fastdecode.core.dtype import DType
from fastdecode.core.errors import WorkerError
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import BlockData, ChunkForm, ReadBlocks
from fastdecode.wire.messages import Close, Failed
from fastdecode.wire.mpi.hub import MpiConnection, MpiHub, neighbour_hub, r_worker_hub
from fastdecode.wire.mpi.job import join, leave
from fastdecode.wire.stages import Meeting
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import PeerLostError
from fastdecode.wire.waiting import look_until_found

ROUNDS = 12
AHEAD = 3  # questions; the last isn't waited for: its answer comes after the line is closed
WAIT_S = 60.0
MOST = MOST_PEERS[Role.READER]
KV = KVSpec(1, 1, 8, DType.FLOAT32)

job = join()
other = 3 - job.rank
num_answered = 0


def serve() -> None:
    """Answer what is here."""
    global num_answered
    try:
        index, message = hub.receive_any(1e-3)
    except PeerLostError as lost:
        hub.connections[lost.index].close()
    except WorkerError:
        pass
    else:
        assert isinstance(message, ReadBlocks)
        with contextlib.suppress(WorkerError):  # it has closed the line; the next message says so
            data = np.full(200_000, message.reading, np.uint8)
            hub.connections[index].send(BlockData(np.ones(1, np.uint8), data))
        num_answered += 1


def answer_of(line: MpiConnection) -> BlockData | Failed:
    """Serve until the next answer is here."""

    def look() -> BlockData | Failed | None:
        serve()
        return line.poll()

    answer = look_until_found(look, WAIT_S)
    assert answer is not None, "no answer comes"
    return answer


def ask(*numbers: int) -> MpiConnection:
    line = neighbours.open(f"rank {other}")
    for number in numbers:
        share = ChunkForm.TOKENS, 0, 1, 0, 1
        none = np.zeros((1, 2), np.int64), np.ones(1, np.int32)
        line.send(ReadBlocks(number, "a model", KV, *share, *none))
    return line


turns = MpiHub(job, frozenset({Meeting}), is_hurried=False)
for rank in {0, 1, 2} - {job.rank}:
    turns.connect(rank, f"rank {rank}", line=14)
if job.rank == 0:
    assert [turns.receive_any(2 * WAIT_S)[1] for _ in range(2)] == [Meeting("done")] * 2
    leave(0)
to_first, to_other = turns.connections
neighbours = neighbour_hub(job, silence_s=10.0)
early = ask(0)
hub = r_worker_hub(job)
assert not answer_of(early).data.any()
early.close()
for turn in range(ROUNDS):
    line = ask(*range(turn, turn + AHEAD))
    for i in range(AHEAD - 1):
        assert (answer_of(line).data == turn + i).all()
    line.close()
assert look_until_found(lambda: serve() or num_answered > ROUNDS * AHEAD or None, WAIT_S)
neighbours.open(f"rank {other}").send(Close(1))  # no greeting, which is dropped
if job.rank == 1:  # the other rank opens no more, where this one may be ahead
    assert len(hub.connections) <= 1 + AHEAD, "places are used again"
    lines = [ask(number) for number in range(MOST)]
    assert all(isinstance(answer_of(line), BlockData) for line in lines)
    refused = answer_of(ask(MOST))
    assert isinstance(refused, Failed) and refused.code == "busy", refused
    to_other.send(Meeting("enough"))
else:
    assert look_until_found(lambda: serve() or to_other.poll(), 2 * WAIT_S)
print(f"rank {job.rank} has read and been read", flush=True)
to_first.send(Meeting("done"))
neighbours.close()
hub.close()
job.wait_for_end()
leave(0)
