"""Lines of text that ``fastdecode top`` shows of a status."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from fastdecode.core.progress import bar

WINDOW_S: Final = 60.0
SILENT_S: Final = 10.0
"""Age above which a status is called old. A command writes it once a second, but clocks of two
machines differ, and a busy machine is late."""


class LiveView:
    """Successive statuses of one command or server.

    Rates and shares are those of the last minute, or since the first status if that is shorter.
    """

    def __init__(self) -> None:
        self._seen: deque[Mapping[str, Any]] = deque()
        self._age_s = 0.0

    def add(self, status: Mapping[str, Any], now_s: float | None = None) -> None:
        """Add a status. That of another process replaces all earlier ones. ``now_s`` is
        ``time.time()``, from which the age of a file's status is computed."""
        if self._seen:
            # The clock of a machine is the same in all of its processes.
            old = self._seen[-1]
            is_earlier = any(status[name] < old[name] for name in ("time_s", "uptime_s"))
            if is_earlier or status.get("pid") != old.get("pid"):
                self._seen.clear()
        written_s = status.get("written")
        self._age_s = 0.0 if written_s is None or now_s is None else now_s - written_s
        self._seen.append(status)
        while self._seen[0]["time_s"] < status["time_s"] - WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()

    def lines(self, width: int = 100) -> list[str]:
        """Return the lines to show, none longer than ``width``."""
        now = self._seen[-1]
        what = now.get("command", "serve")
        model = f"{now['model']}  " if now.get("model") else ""
        told = [f"fastdecode {what}  {model}{now['state']}  up {_duration(now['uptime_s'])}"]
        age = _duration(self._age_s)
        if self._age_s >= SILENT_S and str(now["state"]).startswith("ended"):
            told.append(f"it ended {age} ago")
        elif self._age_s >= SILENT_S:
            told.append(
                f"nothing was written for {age}: process {now['pid']} was killed or stopped, or a "
                "step takes long"
            )
        if now.get("phase"):
            told.append(now["phase"])
        for part in (self._job, self._rates, self._parts, self._r_workers):
            told += part(now)
        return [line[:width] for line in told]

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
            # A server's own count of prompt tokens grows only when a request is over.
            f"{self._rate('num_prompt_tokens'):.0f} of prompts; {now['generation_tokens']} "
            "generated in all",
            f"sequences {now['num_running']} running, {now['num_waiting']} waiting; "
            f"{hits:.0%} of prompt tokens from the cache",
        ]

    def _parts(self, now: Mapping[str, Any]) -> list[str]:
        """Return the shares of the engine's parts, once it has made a step."""
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
        names = [each["name"].removeprefix("R-worker ") for each in workers]
        width = max(map(len, names))
        told = [f"R-workers {now['num_live_r_workers']}/{now['num_r_workers']}"]
        for name, each in zip(names, workers, strict=True):
            used = each["kv_blocks_used"] / max(1, each["kv_blocks"])
            state = f"{bar(used)} {used:>4.0%}  {each['load_tokens']} tokens"
            lost = f"lost: {each['lost']}"
            told.append(f"  {name:<{width}} {lost if each['lost'] else state}")
        return told

    def _rate(self, name: str) -> float:
        first, last = self._seen[0], self._seen[-1]
        elapsed_s = max(float(last["time_s"] - first["time_s"] or last["uptime_s"]), 1e-9)
        return self._grown(name) / elapsed_s

    def _grown(self, name: str) -> float:
        """Return by how much a total of the status, or of the engine's figures, has grown."""
        ends = self._seen[0], self._seen[-1]
        first, last = ({**end, **(end.get("figures") or {})}.get(name, 0.0) for end in ends)
        return max(0.0, float(last - (0.0 if len(self._seen) == 1 else first)))


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
