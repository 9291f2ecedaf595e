"""Links between R-workers: measured, slow or missing."""

from __future__ import annotations

from fastdecode.core.host.facts import this_host
from fastdecode.measure.doctor import ModelFacts, judge
from fastdecode.measure.link import NeighbourFacts, examine_neighbours
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import FromRWorker, ToRWorker
from rworker.transfers.neighbours import ThreadNeighbours
from rworker.worker import start_worker_thread

ENOUGH = 200 << 20


def examined(names: list[str], kv_bytes: int = ENOUGH) -> list[NeighbourFacts]:
    """Examine R-workers r0 and r1 under these names."""
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    neighbours = ThreadNeighbours()
    workers = [
        start_worker_thread(f"r{i}", kv_bytes=kv_bytes, hub=hub, neighbours=neighbours)
        for i in range(2)
    ]
    try:
        ring = zip(workers, names, strict=True)
        return list(examine_neighbours([(w.connection, name, kv_bytes) for w, name in ring]))
    finally:
        for worker in workers:
            worker.stop()
            worker.join(30)


def test_examine_neighbours_finds_each_missing_link() -> None:
    for way in examined(["r0", "r1"]):
        assert not way.error and way.num_bytes and way.bytes_per_s > 0
    first, second = examined(["r0", "r7"])
    assert "no R-worker 'r7'" in first.error  # and r0 can be reached
    assert not second.error
    little = examined(["r0", "r1"], kv_bytes=1 << 20)
    assert all("MB of KV memory each" in way.error for way in little)
    assert not list(examine_neighbours([]))


def test_doctor_names_slow_and_missing_links() -> None:
    ways = [
        NeighbourFacts("R-worker a", "R-worker b", 1 << 30, 0.5),
        NeighbourFacts("R-worker b", "R-worker c", 1 << 20, 0.1),
        NeighbourFacts("R-worker c", "R-worker a", error="nobody is there"),
    ]
    found = [x for x in judge(this_host(), [], neighbours=ways) if x.check == "neighbours"]
    assert [finding.level for finding in found] == ["PASS", "WARN", "WARN"]
    assert "R-worker b to R-worker c: 0.01 GB/s" in found[1].text and "slow" in found[1].text
    assert "nobody is there" in found[2].text and "--replicas" in found[2].mend
    assert "each MiB of K and V is there 100 ms later" in found[1].text
    (with_model, *_) = [
        x
        for x in judge(this_host(), [], ModelFacts("", 1 << 19, 0), neighbours=ways)
        if x.check == "neighbours"
    ]
    assert "keeps up with 4,096 tokens a second" in with_model.text
