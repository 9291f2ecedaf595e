"""What ``fastdecode top`` shows of a status: lines of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from fastdecode.core.progress import bar

WINDOW_S: Final = 60.0
SILENT_S: Final = 10.0
"""A command writes its status once a second. Clocks of two machines differ, and a
busy machine is late."""


class LiveView:
    """Successive statuses of one command or server. Rates and shares are of the
    last minute, or since the first look if that is shorter."""

    def __init__(self) -> None:
        self._seen: deque[Mapping[str, Any]] = deque()
        self._age_s = 0.0

    def add(self, status: Mapping[str, Any], now_s: float | None = None) -> None:
        """One more; another process's begins anew.

        Args:
            now_s: of ``time.time()``, to say how old the status of a file is.
        """
        if self._seen and _is_of_another_process(status, self._seen[-1]):
            self._seen.clear()
        written_s = status.get("written")
        self._age_s = 0.0 if written_s is None or now_s is None else now_s - written_s
        self._seen.append(status)
        while self._seen[0]["time_s"] < status["time_s"] - WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()

    def lines(self, width: int = 100) -> list[str]:
        """What is to be shown, none longer than ``width``."""
        now = self._seen[-1]
        parts = (
            self._head, self._silence, self._phase, self._job, self._rates, self._parts,
            self._r_workers,
        )  # fmt: skip
        every = [line for part in parts for line in part(now)]
        return [line[:width] for line in every]

    def _head(self, now: Mapping[str, Any]) -> list[str]:
        what = now.get("command", "serve")
        model = f"{now['model']}  " if now.get("model") else ""
        return [f"fastdecode {what}  {model}{now['state']}  up {_duration(now['uptime_s'])}"]

    def _silence(self, now: Mapping[str, Any]) -> list[str]:
        """Of a file that is no longer written."""
        if self._age_s < SILENT_S:
            return []
        age = _duration(self._age_s)
        if str(now["state"]).startswith("ended"):
            return [f"it ended {age} ago"]
        return [
            f"nothing was written for {age}: process {now['pid']} was killed or stopped, or a "
            "step takes long"
        ]

    def _phase(self, now: Mapping[str, Any]) -> list[str]:
        """Of a command that measures."""
        return [now["phase"]] if now.get("phase") else []

    def _job(self, now: Mapping[str, Any]) -> list[str]:
        if not now.get("total"):
            return [f"{now['done']} {now['unit']}"] if now.get("done") else []
        share, eta_s = now["done"] / now["total"], now.get("eta_s")
        eta = "-" if eta_s is None else _duration(eta_s)
        return [
            f"{now['unit']} {bar(share)} {now['done']}/{now['total']}, {now['num_failed']} failed, "
            f"ETA {eta}"
        ]

    def _rates(self, now: Mapping[str, Any]) -> list[str]:
        if "generation_tokens" not in now:
            return []
        cached, prompts = now["cached_tokens"], now["prompt_tokens"]
        hits = cached / prompts if cached else 0.0
        return [
            f"tokens/s {self._rate('generation_tokens'):.0f} generated, "
            f"{self._prompt_rate():.0f} of prompts; {now['generation_tokens']} generated "
            "in all",
            f"sequences {now['num_running']} running, {now['num_waiting']} waiting; "
            f"{hits:.0%} of prompt tokens from the cache",
        ]

    def _parts(self, now: Mapping[str, Any]) -> list[str]:
        """Of the engine, once it has made a step."""
        if not now.get("figures"):
            return []
        busy, waited = self._grown("s_compute_s"), self._grown("wait_s")
        share = busy / (busy + waited) if busy + waited else 0.0
        num = max(1, now["num_live_r_workers"])
        r_share = min(1.0, self._grown("r_busy_s") / ((busy + waited) * num or 1.0))
        lanes = now["figures"]["lanes"]
        return [
            f"S-part {bar(share)} {share:.0%}  R-part {bar(r_share)} {r_share:.0%}  "
            f"{lanes} {'lane' if lanes == 1 else 'lanes'}",
            f"KV     {bar(now['kv_used'])} {now['kv_used']:.0%} reserved",
        ]

    def _r_workers(self, now: Mapping[str, Any]) -> list[str]:
        workers = now.get("figures", {}).get("r_workers", [])
        if not workers:
            return []
        live = f"{now['num_live_r_workers']}/{now['num_r_workers']}"
        names = [each["name"].removeprefix("R-worker ") for each in workers]
        width = max(map(len, names))
        told = [f"R-workers {live}"]
        for name, each in zip(names, workers, strict=True):
            told.append(f"  {name:<{width}} {_state_of(each)}")
        return told

    def _prompt_rate(self) -> float:
        """Of tokens that the engine ran: a server counts a prompt when its request is over."""
        last = self._seen[-1]
        if not last.get("figures"):
            return 0.0
        elapsed_s = last["time_s"] - self._seen[0]["time_s"] or last["uptime_s"]
        return self._grown("num_prompt_tokens") / max(float(elapsed_s), 1e-9)

    def _rate(self, name: str) -> float:
        first, last = self._seen[0], self._seen[-1]
        if first is last:
            return float(last[name] / max(last["uptime_s"], 1e-9))
        elapsed_s = last["time_s"] - first["time_s"]
        return max(0.0, float((last[name] - first[name]) / max(elapsed_s, 1e-9)))

    def _grown(self, name: str) -> float:
        """Of the engine's totals."""
        first, last = self._seen[0].get("figures") or {}, self._seen[-1]["figures"]
        before = 0.0 if len(self._seen) == 1 else first.get(name, 0.0)
        return max(0.0, float(last[name] - before))


def _state_of(worker: Mapping[str, Any]) -> str:
    if worker["lost"]:
        return f"lost: {worker['lost']}"
    used = worker["kv_blocks_used"] / max(1, worker["kv_blocks"])
    return f"{bar(used)} {used:>4.0%}  {worker['load_tokens']} tokens"


def _is_of_another_process(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """The clock of one machine goes on from one process to the next."""
    return bool(
        new.get("pid") != old.get("pid")
        or new["time_s"] < old["time_s"]
        or new["uptime_s"] < old["uptime_s"]
    )


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
