"""How an R-worker's attention prefetches: as the environment says, as a measurement on this
host showed before, or as one shows now."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cpu_kernels import BlockLayout
from cpu_kernels.prefetch import DEFAULT_PREFETCH, Prefetch, find_prefetch
from fastdecode.core.errors import ConfigError
from fastdecode.core.files import write_json
from fastdecode.core.host.machine import cpu_name
from fastdecode.core.host.user_cache import can_write, user_cache

if TYPE_CHECKING:
    from cpu_kernels.prefetch_trial import Trial

logger = logging.getLogger(__name__)

PREFETCH_VARIABLE: Final = "FASTDECODE_PREFETCH"
"""Environment variable that names the way; unset or "auto": it is measured."""
MIN_CACHE_BYTES: Final = 2 << 30
"""A smaller cache isn't worth a measurement."""
MIN_BLOCK_BYTES: Final = 64 << 10
"""Nor is a model with smaller blocks."""
_MIN_TRIAL_BYTES, _MAX_TRIAL_BYTES = 256 << 20, 1 << 30
_L3_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_MOST_KEPT_BYTES = 1 << 16


@dataclass(frozen=True)
class KeptTrial:
    """One measurement, as its file holds it."""

    cpu: str
    case: str
    """The layout, query heads and threads, for people."""
    versions: str
    """Of the compiler and the kernels; with others it is measured again."""
    chosen: str
    gb_per_s: dict[str, float]

    def text(self) -> str:
        """One line for people."""
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in self.gb_per_s.items())
        return f"{self.case}: {self.chosen} (GB/s: {rates})"


class PrefetchChoices:
    """One R-worker's.

    Args:
        directory: where measurements are kept.
        named: a way's name, or "auto".
        measure: ``prefetch_trial.measure_prefetch`` by default.

    Raises:
        ConfigError: there is no way of that name.
    """

    def __init__(
        self,
        directory: Path,
        named: str = "auto",
        measure: Callable[..., Trial] | None = None,
    ) -> None:
        self._directory, self._measure = directory, measure
        self._named: Prefetch | None = None
        if named != "auto":
            try:
                self._named = find_prefetch(named)
            except ValueError as error:
                raise ConfigError(f"{PREFETCH_VARIABLE}: {error}, or auto") from None

    @classmethod
    def of_host(cls, environ: Mapping[str, str] = os.environ) -> PrefetchChoices:
        """As the environment says; measurements are kept in this user's cache directory.

        Raises:
            ConfigError: the environment names a way that there isn't.
        """
        return cls(user_cache("prefetch", environ), environ.get(PREFETCH_VARIABLE) or "auto")

    def choose(
        self,
        layout: BlockLayout,
        num_q_heads: int,
        source: str,
        cache_bytes: int,
        threads: Mapping[str, Any],
        report: Callable[[str], None] | None = None,
    ) -> Prefetch:
        """The way for one layout. Of an R-workers' host one process measures, and the others
        wait for it.

        Args:
            cache_bytes: of the whole cache.
            threads: ``attend``'s ``num_threads`` and ``team``.
            report: takes a line of progress.
        """
        if self._named is not None:
            return self._named
        if cache_bytes < MIN_CACHE_BYTES or layout.block_bytes < MIN_BLOCK_BYTES:
            return DEFAULT_PREFETCH
        case = _case(layout, num_q_heads, source, threads)
        name = sha256(f"{cpu_name()}\n{case}".encode()).hexdigest()[:16]
        path = self._directory / f"{name}.json"
        kept = _read(path)
        if kept is None:
            with _turn_of(path):
                kept = _read(path)  # the process before may have written it
                if kept is None:
                    if report is not None:
                        kept_too = " (kept for the next start)" if can_write(path.parent) else ""
                        report(f"measuring how to prefetch{kept_too}")
                    kept = self._try_all(path, case, (layout, num_q_heads, source), threads)
        logger.debug("attention prefetches %s", kept.text())
        return find_prefetch(kept.chosen)

    def _try_all(
        self, path: Path, case: str, measured: tuple[Any, ...], threads: Mapping[str, Any]
    ) -> KeptTrial:
        """Measure, and keep what was found, unless the host had too much else to do: then the
        next start measures again."""
        from cpu_kernels.prefetch_trial import measure_prefetch

        measure = self._measure or measure_prefetch
        trial = measure(*measured, num_bytes=_trial_bytes(), **threads)
        kept = KeptTrial(cpu_name(), case, _versions(), trial.chosen.name, trial.gb_per_s)
        if not trial.is_calm:
            logger.debug("how attention prefetches isn't kept: the host is busy")
            return kept
        try:
            write_json(path, asdict(kept), "prefetch")
        except (OSError, ConfigError) as error:
            logger.info("how attention prefetches isn't kept: %s", error)
        return kept


def kept_trials(directory: Path) -> list[KeptTrial]:
    """The measurements of this CPU and these versions that a directory holds."""
    found = [_read(path) for path in sorted(directory.glob("*.json"))]
    return [kept for kept in found if kept is not None and kept.cpu == cpu_name()]


def _case(layout: BlockLayout, num_q_heads: int, source: str, threads: Mapping[str, Any]) -> str:
    own = "" if threads.get("team") is None else " of OpenMP"
    return (
        f"{layout.dtype} for {source}, {num_q_heads}/{layout.num_kv_heads} heads of "
        f"{layout.head_dim}, blocks of {layout.block_size}, threads {threads['num_threads']}{own}"
    )


def _versions() -> str:
    from cpu_kernels.codegen.compiled import sources_digest

    return str(sources_digest())


def _read(path: Path) -> KeptTrial | None:
    """None: there is none, or it isn't of these versions, or is damaged."""
    try:
        if path.stat().st_uid != os.geteuid() or path.stat().st_size > _MOST_KEPT_BYTES:
            return None
        kept = KeptTrial(**json.loads(path.read_bytes()))
        find_prefetch(kept.chosen)
        kept.text()
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return kept if kept.versions == _versions() else None


@contextlib.contextmanager
def _turn_of(path: Path) -> Iterator[None]:
    """Of the processes of a host, one at a time is within."""
    from cpu_kernels.codegen.kept import Turn

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    turn = Turn(f"{path}.lock")
    turn.take()
    try:
        yield
    finally:
        turn.give_back()


def _trial_bytes() -> int:
    """Twice the last cache, within limits."""
    try:
        l3_bytes = int(_L3_FILE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        l3_bytes = 0
    return min(max(_MIN_TRIAL_BYTES, 2 * l3_bytes), _MAX_TRIAL_BYTES)
