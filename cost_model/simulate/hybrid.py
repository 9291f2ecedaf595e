"""The virtual clock with KV on both sides: lanes that step when they are ready,
on one device and R-workers that they share.

Time passes from one end of a lane's step to the next. In between, lanes go on
at the speed that the device and the R-workers leave them: an away lane needs
the device for its S-part, and R-workers for its attention, and waits for a
layer of the home lane's before each of its own; the home lane has what is left
of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.simulate.simulator import SimulationOutcome, Simulator
from cost_model.simulate.trace import RequestTrace
from fastdecode.core.holders import HolderId
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.life.events import Regrouped, Run
from fastdecode.schedule.times import StepTimes


@dataclass
class Flight:
    """A lane's step under way."""

    run: Run
    device_s: float
    """Of the device's time, alone."""
    r_s: float
    """Of the busiest R-worker's time, alone."""
    link_s: float
    loads: dict[int, int]
    num_decoding: int
    left: float = 1.0
    """The part of it that is still to come."""


class HybridSimulator(Simulator):
    """Runs one trace to its end.

    Args:
        scheduler: of holders of which one is the device; with its
            ``HybridControl``, or with none: then all have one lane.
        times: what steps really take, the device's attention as if it were an
            R-worker's.
        device: which holder it is.
        link_s: the way to R-workers and back, over all layers.
        predicted_link_s: what the control is told of it.
    """

    def __init__(
        self,
        trace: RequestTrace,
        scheduler: ContinuousScheduler,
        times: StepTimes,
        device: HolderId,
        *,
        worker_blocks: tuple[int, ...],
        block_size: int,
        link_s: float,
        predicted_link_s: float,
    ) -> None:
        super().__init__(
            trace, scheduler, times, worker_blocks=worker_blocks, block_size=block_size
        )
        self._device = device
        self._way_s, self._predicted_way_s = link_s, predicted_link_s
        self._control = scheduler.hybrid
        self._flights: dict[int, Flight] = {}
        self._wanted_lanes = 1

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._now_s

    def run(self) -> SimulationOutcome:
        """Run the trace to its end."""
        while self._unserved or self._coming:
            self._arrive()
            self._start_lanes()
            if self._flights:
                self._pass_time()
            elif self._unserved:
                raise AssertionError("sequences are unfinished, and nobody steps")
            elif self._coming:
                self._sleep_until(self._coming[0].arrival)
        self.outcome.num_suspended = self._lifecycle.num_suspended
        self.outcome.total_s = self._now_s
        return self.outcome

    def _start_lanes(self) -> None:
        if self._wanted_lanes != self._num_lanes:
            if self._flights:
                return  # they come to rest first
            self._num_lanes = self._wanted_lanes
            self._tell(Regrouped(self._num_lanes))
            assert self._control is not None
            self._control.regrouped(self._num_lanes)
        for lane in range(self._num_lanes):
            if lane not in self._flights:
                for run in self._launch(lane):
                    self._flights[lane] = self._flight(run)
        if not self._flights and self._control is not None:
            self._wanted_lanes = self._control.decide()
            if self._wanted_lanes != self._num_lanes:
                self._start_lanes()

    def _flight(self, run: Run) -> Flight:
        loads: dict[int, int] = {}
        for chunk in run.chunks:
            assert chunk.sequence.residence is not None
            (part,) = chunk.sequence.residence.parts
            seen = chunk.sequence.num_cached + chunk.num_tokens
            loads[part.holder] = loads.get(part.holder, 0) + seen
        times = self._times
        s_part_s = times.s_part_s(sum(chunk.num_tokens for chunk in run.chunks))
        at_home = loads.get(self._device)
        attend_s = 0.0 if at_home is None else times.r_part_s(self._device, at_home)
        away = [times.r_part_s(w, load) for w, load in loads.items() if w != self._device]
        num_decoding = sum(chunk.num_tokens == 1 for chunk in run.chunks)
        if run.lane == 0:
            # Rows of both sides: R-workers attend while the device does.
            attend_s = max(attend_s, max(away) + self._way_s if away else 0.0)
            return Flight(run, s_part_s + attend_s, 0.0, 0.0, loads, num_decoding)
        return Flight(run, s_part_s, max(away), self._way_s, loads, num_decoding)

    def _speeds(self) -> dict[int, float]:
        """Steps a second of each lane under way."""
        home = self._flights.get(0)
        home_s = 0.0 if home is None else home.device_s
        away = {lane: flight for lane, flight in self._flights.items() if lane}
        speeds = {
            lane: 1 / max(f.device_s + f.r_s + f.link_s + home_s, 1e-12) for lane, f in away.items()
        }
        device_s = sum(flight.device_s for flight in away.values())
        used = sum(away[lane].device_s * speed for lane, speed in speeds.items())
        r_used = sum(away[lane].r_s * speed for lane, speed in speeds.items())
        most = device_s / (device_s + home_s) if device_s else 1.0
        slower = min(1.0, most / used if used else 1.0, 1 / r_used if r_used else 1.0)
        speeds = {lane: slower * speed for lane, speed in speeds.items()}
        if home is not None:
            speeds[0] = (1 - slower * used) / max(home_s, 1e-12)
        return speeds

    def _pass_time(self) -> None:
        """Until the next end of a step."""
        speeds = self._speeds()
        lane = min(self._flights, key=lambda lane: self._flights[lane].left / speeds[lane])
        span_s = self._flights[lane].left / speeds[lane]
        self._now_s += span_s
        for each, flight in self._flights.items():
            flight.left -= span_s * speeds[each]
        self._finish(lane, self._flights.pop(lane))

    def _finish(self, lane: int, flight: Flight) -> None:
        self._step += 1
        self._done(flight.run)
        if self._control is not None:
            self._control.observe(lane, flight.num_decoding, flight.loads, self._predicted_way_s)
            self._wanted_lanes = self._control.decide()
