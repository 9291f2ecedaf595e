"""A simulated device that lanes share with R-workers: KV on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastdecode.core.holders import HolderId
from fastdecode.schedule.life.events import Run
from fastdecode.schedule.simulation.resources import Flight, SimulatedStep, loads_of, tokens_of
from fastdecode.schedule.times import StepTime


@dataclass
class SharedDevice:
    """KV on both sides: lanes share a device and R-workers, and step when they
    are ready. Lane 0 has the sequences whose KV is on the device.

    In between, lanes continue at the speed that the device and the R-workers leave
    them: an away lane needs the device for its S-part, and R-workers for its
    attention, and waits for a layer of the home lane's before each of its own;
    the home lane has what is left of the device.

    Args:
        times: what steps take, the device's attention as if it were an R-worker's.
        device: which holder it is.
    """

    times: StepTime
    device: HolderId
    steps: list[SimulatedStep] = field(default_factory=list)
    """Always empty, since lanes don't step in rounds."""

    def flight(self, run: Run) -> Flight:
        """As ``Resources``. A step of lane 0 has rows of both sides: R-workers
        attend while the device does."""
        loads, times = loads_of(run.chunks), self.times
        num_tokens = sum(chunk.num_tokens for chunk in run.chunks)
        s_part_s, trip_s = times.s_part_s(*tokens_of(run.chunks)), times.trip_s(num_tokens)
        at_home = loads.get(self.device)
        attend_s = 0.0 if at_home is None else times.r_part_s(self.device, at_home)
        away = [times.r_part_s(w, load) for w, load in loads.items() if w != self.device]
        if run.lane == 0:
            attend_s = max(attend_s, max(away) + trip_s if away else 0.0)
            return Flight(run, s_part_s + attend_s, (), 0.0, loads, num_tokens)
        return Flight(run, s_part_s, (max(away),), trip_s, loads, num_tokens)

    def steps_s(self, flights: Mapping[int, Flight], now_s: float) -> Mapping[int, float]:
        home = flights.get(0)
        home_s = 0.0 if home is None else home.s_part_s
        away = {lane: flight for lane, flight in flights.items() if lane}
        alone_s = {lane: max(flight.way_s + home_s, 1e-12) for lane, flight in away.items()}
        device_s = sum(flight.s_part_s for flight in away.values())
        used = sum(away[lane].s_part_s / step_s for lane, step_s in alone_s.items())
        r_used = sum(max(away[lane].r_parts_s) / step_s for lane, step_s in alone_s.items())
        most = device_s / (device_s + home_s) if device_s else 1.0
        slower = min(1.0, most / used if used else 1.0, 1 / r_used if r_used else 1.0)
        found = {lane: step_s / slower for lane, step_s in alone_s.items()}
        if home is not None:
            found[0] = max(home_s, 1e-12) / (1 - slower * used)
        return found
