"""The groups of options of an engine, but for the S-part's. Frozen, and valid from
construction on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdecode.core.config.options import check_options, option
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given

MAX_R_WORKERS = 4096
R_PARTITIONS = ("sequences", "heads")
KV_PLACEMENTS = ("r", "gpu", "swap", "hybrid", "auto")
PROMPT_ATTENTION = ("auto", "s", "r")
SCHEDULES = ("auto", "stabilized", "fixed-f", "greedy", "synchronized")


def _gigabytes(help: str, **more: Any) -> Any:
    """An option for an amount of memory. None: decide for me."""
    return option(None, help, low=1e-6, high=1e6, unit="GB", metavar="GB", **more)


@dataclass(frozen=True)
class RPart:
    """The R-part: the KV cache, and attention to it."""

    kv_dtype: str = option(
        "auto",
        "dtype of the KV cache: float32, bfloat16, float16, int8, int4; auto: the activations' "
        "dtype",
        metavar="DTYPE",
        common=True,
    )
    kv_placement: str = option(
        "auto",
        "where the KV cache is: r (R-workers), gpu (the S-worker's device), swap (with --pp 3 or "
        "more: two lanes' on each device and the rest in host memory, copied in while a lane "
        "computes), hybrid (the device first, then R-workers where that pays); auto: on a GPU the "
        "one with most tokens/s by the estimate of fastdecode size, else r",
        choices=KV_PLACEMENTS,
        metavar="WHERE",
        common=True,
    )
    prompt_attention: str = option(
        "auto",
        "where prompt tokens are attended: s (S-worker), r (R-workers); auto: s on a GPU, r on a "
        "CPU",
        choices=PROMPT_ATTENTION,
        metavar="WHO",
    )
    r_workers: int = option(
        1,
        "number of R-workers to start in this process; with --pp, in each stage",
        low=1,
        high=MAX_R_WORKERS,
        common=True,
    )
    r_partition: str = option(
        "sequences",
        "how R-workers share the KV cache: sequences (each has whole sequences), heads (each has "
        "some KV heads of every sequence)",
        choices=R_PARTITIONS,
        metavar="WHAT",
    )
    split_tokens: int | None = option(
        None,
        "split a sequence into parts of N tokens, on several R-workers; default: each sequence is"
        " on one R-worker",
        low=1,
        high=1 << 30,
    )
    r_threads: int | None = option(
        None,
        "CPU threads of each R-worker in this process; default: this machine's cores, divided "
        "evenly",
        low=1,
        high=4096,
        common=True,
    )
    kv_memory_gb: float | None = _gigabytes(
        "memory for the KV cache of each R-worker, in GB of 1e9 bytes; default: half of the free "
        "memory beside the S-part, divided evenly",
        common=True,
    )
    device_kv_gb: float | None = _gigabytes(
        "with hybrid KV: memory for the KV cache on the device, in GB of 1e9 bytes; default: all "
        "that is free there; on a CPU as much as each R-worker has"
    )
    block_size: int = option(64, "tokens in a KV block; a multiple of 16", low=16, high=256)
    replicas: int | str = option(
        0,
        "copies of each R-worker's KV cache, from which sequences continue after a loss: 0, 1 (kept"
        " by another R-worker; takes half of the KV memory, or with KV on the device as much host "
        "memory as the device's cache), disk (one, as a file in the R-workers' --cache-disk: any "
        "R-worker that reaches the directory restores a lost one's)",
        low=0,
        high=1,
        choices=("disk",),
        metavar="WHERE",
        common=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_dtype != "auto":
            DType.parse(self.kv_dtype, option="kv_dtype", of_kv=True, or_auto=True)
        if self.block_size % 16:
            raise ConfigError(
                Given("block_size", self.block_size),
                " is not a multiple of 16, by which kernels read",
            )
        if self.split_tokens is not None:
            self._check_split(self.split_tokens)

    @property
    def is_on_device(self) -> bool:
        """Whether the S-workers' devices attend: there are no R-workers."""
        return self.kv_placement in ("gpu", "swap")

    @property
    def swaps(self) -> bool:
        """Whether lanes' KV is in host memory while they do not compute."""
        return self.kv_placement == "swap"

    @property
    def num_replicas(self) -> int:
        """Of each cache, wherever they are."""
        return int(bool(self.replicas))

    @property
    def is_replicated_on_disk(self) -> bool:
        """Whether replicas are in files, and not in the memory of other R-workers."""
        return self.replicas == "disk"

    def _check_split(self, split_tokens: int) -> None:
        if split_tokens % self.block_size:
            above = -(-split_tokens // self.block_size) * self.block_size
            raise ConfigError(
                Given("split_tokens", split_tokens),
                " is not a multiple of ",
                Given("block_size", self.block_size),
                f": take {above}",
            )


@dataclass(frozen=True)
class Batching:
    """What runs together, and when it starts."""

    max_num_sequences: int = option(
        256, "most sequences that run at once", low=1, high=1 << 20, common=True
    )
    prefill_chunk: int | None = option(
        None,
        "most prompt tokens of one sequence in a step; a longer prompt takes several steps; auto "
        "(default): a whole step on a GPU, else 512",
        low=1,
        high=1 << 24,
        auto=True,
    )
    max_step_tokens: int | None = option(
        None,
        "most tokens of all sequences in a step; default: --max-num-sequences, plus 2048 or one "
        "prefill chunk",
        low=2,
        high=1 << 23,
    )
    lanes: int | None = option(
        None,
        "parts of the batch that take turns on the S-worker; auto (default): as many as pay by "
        "measured times, 1 where S-part and R-part share cores",
        low=1,
        high=64,
        auto=True,
    )
    schedule: str = option(
        "auto",
        "when sequences start: stabilized, fixed-f, greedy, synchronized; auto: stabilized with a "
        "load limit, or with several lanes while it is forecast to pay, else greedy",
        choices=SCHEDULES,
        metavar="MODE",
    )
    load_limit: int | None = option(
        None,
        "most cached tokens over all running sequences, W; default: from measured step times",
        low=1,
        high=1 << 40,
        metavar="W",
    )
    length_quantile: float | None = option(
        None,
        "reserve KV blocks for this quantile of finished lengths; a sequence that outgrows them "
        "may be suspended and recomputed; default: reserve for max_tokens",
        low=1e-6,
        high=1.0,
        metavar="Q",
    )
    expected_output_tokens: int | None = option(
        None,
        "tokens a sequence is expected to generate until enough have finished, and with "
        "--schedule fixed-f always, S; default: its max_tokens",
        low=1,
        high=1 << 24,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_step_tokens is not None and self.max_step_tokens <= self.max_num_sequences:
            raise ConfigError(
                Given("max_step_tokens", self.max_step_tokens),
                " must exceed ",
                Given("max_num_sequences", self.max_num_sequences),
                ": every running sequence decodes one token a step, and prompts need the rest",
            )
        if self.schedule == "fixed-f" and self.expected_output_tokens is None:
            raise ConfigError(
                "fixed intervals need ",
                Given("expected_output_tokens"),
                ": tokens that a sequence typically generates",
            )

    @property
    def step_tokens(self) -> int:
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        return self.max_num_sequences + max(2048, self.prefill_chunk or 0)

    def chunk_tokens(self, *, on_gpu: bool = False) -> int:
        """``prefill_chunk`` with its default applied. What a GPU computes of a
        prompt in one step, R-workers needn't attend as its past."""
        room = self.step_tokens - self.max_num_sequences
        return self.prefill_chunk or (room if on_gpu else 512)


@dataclass(frozen=True)
class Cluster:
    """How R-workers are reached, and how long they may be silent."""

    r_worker_addresses: tuple[str, ...] = option(
        (),
        "address of an R-worker, tcp://HOST:PORT, as given to fastdecode r-worker --bind; "
        "repeatable; default: R-workers are the other ranks under mpirun, else threads",
        flag="--r-worker",
        metavar="ADDRESS",
        common=True,
    )
    key: str | None = option(
        None,
        "the cluster's key file, for R-workers on other hosts; none: plain, on trusted networks",
        metavar="FILE",
    )
    worker_silence_s: float = option(
        5.0,
        "give up an R-worker (mpi, zmq) whose heartbeat is missing for this long",
        low=0.5,
        high=3600,
        unit="s",
        metavar="S",
    )
    worker_timeout_s: float = option(
        300.0,
        "give up an R-worker that owes a reply for this long, though its heartbeat arrives",
        low=1e-3,
        high=1e6,
        unit="s",
        metavar="S",
    )
    spare_r_workers: int = option(
        0,
        "standby R-workers, of each stage; one replaces an R-worker that is lost; under MPI the "
        "last N ranks",
        low=0,
        high=MAX_R_WORKERS,
    )

    def __post_init__(self) -> None:
        check_options(self)
        addresses = tuple(self.r_worker_addresses)
        object.__setattr__(self, "r_worker_addresses", addresses)
        listed = Given("r_worker_addresses")
        if len(set(addresses)) < len(addresses) or len(addresses) > MAX_R_WORKERS:
            raise ConfigError(listed, f": give each address once, and {MAX_R_WORKERS} at most")
