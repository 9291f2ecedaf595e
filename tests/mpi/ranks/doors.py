"""Two R-workers of different instances that read each other, over and over;
run in an MPI job of three ranks, of which the first only waits."""

from __future__ import annotations

import contextlib
import time

from fastdecode.core.errors import WorkerError
from fastdecode.wire.blocks import DescribeExport, ExportExpired
from fastdecode.wire.messages import PROTOCOL_VERSION, Failed
from fastdecode.wire.mpi import joining, leaving
from fastdecode.wire.mpi.control import TheEnd
from fastdecode.wire.mpi.doors import DoorHub, Doors, RankReaders, ReaderConnection
from fastdecode.wire.mpi.job import MpiJob
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import PeerLostError

ROUNDS = 12
AHEAD = 3
"""Questions of which the last isn't waited for: its answer is on the way when
the line is closed."""
SILENCE_S = 10.0


class RWorker:
    def __init__(self, job: MpiJob) -> None:
        self.job = job
        self.other = 3 - job.rank
        self.readers = RankReaders(job, SILENCE_S)
        self.end = TheEnd(job)
        self.door = DoorHub(job, self.other, Doors(job, [self.other], self.readers), self.end)
        self.num_answered = 0

    def serve(self) -> None:
        """Answer what is here: each line's questions in order, by its own number."""
        try:
            index, message = self.door.receive_any(1e-3)
        except PeerLostError as lost:
            self.door.connections[lost.index].close()
            return
        except WorkerError:
            return
        assert isinstance(message, DescribeExport)
        with contextlib.suppress(WorkerError):  # it has closed the line, which is told next
            self.door.connections[index].send(ExportExpired(f"{message.ticket} {'.' * 200_000}"))
        self.num_answered += 1

    def read(self, turn: int) -> None:
        line = self.readers.connect(f"rank {self.other}", 0)
        tickets = [f"{turn}/{i}" for i in range(AHEAD)]
        for ticket in tickets:
            line.send(DescribeExport(PROTOCOL_VERSION, ticket))
        for ticket in tickets[:-1]:
            assert self.answer(line).split()[0] == ticket
        line.close()

    def answer(self, line: ReaderConnection) -> str:
        end_s = time.monotonic() + 60.0
        while (answer := line.poll()) is None:
            assert time.monotonic() < end_s, "no answer comes"
            self.serve()
        assert isinstance(answer, ExportExpired)
        return answer.reason

    def knock_too_often(self) -> None:
        """What can't be is ignored, and of too many readers the last are refused."""
        mine = range(1001, 2**14, 2)
        for number in (1 << 31, 2**14 - 1, mine[0] + 1, mine[0], mine[0]):
            self.readers._knock(self.other, number)
        for number in mine[1 : MOST_PEERS[Role.READER]]:
            self.readers._knock(self.other, number)
        line = self.readers.connect(f"rank {self.other}", 0)
        end_s = time.monotonic() + 30.0
        while not isinstance(answer := line.poll(), Failed):
            assert answer is None and time.monotonic() < end_s, "it isn't refused"
            self.serve()
        assert answer.code == "busy", answer
        line.close()
        with self.job.lock:
            self.job.comm.Send(b"over", self.other, 7)

    def serve_knocks(self) -> None:
        end_s, is_over = time.monotonic() + 30.0, False
        while not is_over:
            assert time.monotonic() < end_s, "the other one knocks for ever"
            self.serve()
            with self.job.lock:
                is_over = self.job.comm.Iprobe(self.other, 7)
        assert len(self.door._doors._lines) == MOST_PEERS[Role.READER]


def main() -> None:
    job = joining.join()
    if job.rank:
        worker = RWorker(job)
        for turn in range(ROUNDS):
            worker.read(turn)
        end_s = time.monotonic() + 60.0
        while worker.num_answered < ROUNDS * AHEAD:
            assert time.monotonic() < end_s, "not all was asked"
            worker.serve()
        places = len(worker.door.connections), len(worker.readers._hub.connections)
        assert max(places) <= 1 + AHEAD, places
        if job.rank == 1:
            worker.knock_too_often()
        else:
            worker.serve_knocks()
        print(f"rank {job.rank} has read and been read", flush=True)
        worker.readers.close()
        worker.door.close()
        job.comm.Send(b"done", 0, 7)
        worker.end.wait()
        leaving.leave(0)
    for rank in (1, 2):
        with job.lock:
            job.comm.Recv(bytearray(4), rank, 7)
    leaving.leave(0)


if __name__ == "__main__":
    main()
