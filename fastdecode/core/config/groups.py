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
TRANSPORTS = ("auto", "inproc", "mpi", "zmq")
KV_PLACEMENTS = ("r", "gpu", "hybrid", "auto")
PROMPT_ATTENTION = ("auto", "s", "r")
SCHEDULES = ("auto", "stabilized", "fixed-f", "greedy", "synchronized")
COLD_STARTS = ("headroom", "none")


def _gigabytes(help: str) -> Any:
    """An option for an amount of memory. None: decide for me."""
    return option(None, help, low=1e-6, high=1e6, unit="GB", metavar="GB")


@dataclass(frozen=True)
class RPart:
    """The R-part: the KV cache, and attention to it."""

    kv_dtype: str = option(
        "auto",
        "KV cache: float32, bfloat16, float16, int8, int4; auto: like the activations",
        metavar="DTYPE",
    )
    kv_placement: str = option(
        "auto",
        "where the KV cache is: r (on R-workers), gpu (on the S-part's device, whatever it is; no "
        "R-workers), hybrid (on the device, and on R-workers what it has no room for, where that "
        "pays); auto: on a GPU what fastdecode size estimates to give most tokens a second, else r",
        choices=KV_PLACEMENTS,
        metavar="WHERE",
    )
    prompt_attention: str = option(
        "auto",
        "who attends the tokens of prompts: the S-worker (s), merged with what R-workers make of "
        "earlier chunks, or the R-workers (r), like tokens that decode; auto: s on a GPU, else r, "
        "whose kernels are faster on a CPU than torch's",
        choices=PROMPT_ATTENTION,
        metavar="WHO",
    )
    r_workers: int = option(
        1,
        "R-workers to start in this process: threads; a single one beside an S-part on the same "
        "cores works in the S-worker's own thread; with several stages, so many of each",
        low=1,
        high=MAX_R_WORKERS,
    )
    r_partition: str = option(
        "sequences",
        "each R-worker has some sequences, or some KV heads of every sequence (heads)",
        choices=R_PARTITIONS,
        metavar="WHAT",
    )
    split_tokens: int | None = option(
        None,
        "keep sequences that may get longer as parts of N tokens on several R-workers, which "
        "attend them together; "
        "default: each on one",
        low=1,
        high=1 << 30,
    )
    r_threads: int | None = option(
        None,
        "CPU threads of each R-worker in this process; default: this machine's cores shared out",
        low=1,
        high=4096,
    )
    kv_memory_gb: float | None = _gigabytes(
        "KV cache of each R-worker, in GB of 1e9 bytes; default: half of the memory that the "
        "S-part leaves free, shared out"
    )
    device_kv_gb: float | None = _gigabytes(
        "with KV on both sides, KV cache on the device, in GB of 1e9 bytes; default: what is left "
        "there, or on a CPU as much as each R-worker's"
    )
    away_tpot_s: float | None = option(
        None,
        "with KV on both sides, most seconds a token of a sequence may take whose KV is on an "
        "R-worker: else it waits for room on the device; default: whatever is done soonest",
        low=1e-4,
        high=3600,
        unit="s",
        metavar="S",
    )
    block_size: int = option(64, "tokens in a KV block; a multiple of 16", low=16, high=256)
    replicas: int = option(
        0,
        "copies of each R-worker's KV cache that another R-worker keeps: with 1, sequences of one "
        "that is lost go on from there; it takes half of the KV memory",
        low=0,
        high=1,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_dtype != "auto":
            DType.parse(self.kv_dtype, option="kv_dtype", of_kv=True)
        if self.block_size % 16:
            raise ConfigError(
                Given("block_size", self.block_size),
                " is not a multiple of 16, by which kernels read",
            )
        if self.split_tokens is not None:
            self._check_split(self.split_tokens)

    def _check_split(self, split_tokens: int) -> None:
        if split_tokens % self.block_size:
            above = -(-split_tokens // self.block_size) * self.block_size
            raise ConfigError(
                Given("split_tokens", split_tokens),
                " is not a multiple of ",
                Given("block_size", self.block_size),
                f": take {above}",
            )
        if self.r_partition == "heads":
            raise ConfigError(
                Given("split_tokens"),
                " is for R-workers that each have sequences; with ",
                Given("r_partition", "heads"),
                " each has a part of every sequence already: leave one of the two out",
            )


@dataclass(frozen=True)
class Batching:
    """What runs together, and when it starts."""

    max_num_sequences: int = option(256, "most sequences that run at once", low=1, high=1 << 20)
    prefill_chunk: int | None = option(
        None,
        "most prompt tokens of one sequence in a step; longer prompts take several steps; auto "
        "(default): on a GPU all that a step has room for, else 512",
        low=1,
        high=1 << 24,
        auto=True,
    )
    max_step_tokens: int | None = option(
        None,
        "most tokens of all sequences in a step; default: the most sequences, and 2048 or one "
        "prefill chunk",
        low=2,
        high=1 << 23,
    )
    lanes: int | None = option(
        None,
        "parts of the running batch that take turns on the S-worker; auto (default): as many as "
        "pay by what steps turn out to take where S-part and R-part have hardware of their own, "
        "else 1",
        low=1,
        high=64,
        auto=True,
    )
    schedule: str = option(
        "auto",
        "stabilized, fixed-f, greedy or synchronized; auto: stabilized with several lanes or a "
        "load limit, else greedy",
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
    target_length: int | None = option(
        None,
        "tokens that a sequence typically generates, S; needed by fixed intervals",
        low=1,
        high=1 << 40,
        metavar="S",
    )
    interval: int | None = option(
        None,
        "steps between micro-batches, of fixed intervals; default: S/16, or S over a lane's "
        "sequences if that is more",
        low=1,
        high=1 << 40,
        metavar="F",
    )
    cold_start: str = option(
        "headroom",
        "how stabilized fills an empty lane: headroom (leaving room for those that start later), "
        "or none (at once)",
        choices=COLD_STARTS,
        metavar="HOW",
    )
    learn_lengths: bool = option(
        True, "project load by the lengths of finished requests, not by max_tokens"
    )
    length_quantile: float | None = option(
        None,
        "reserve KV blocks by this quantile of finished lengths, and suspend and recompute "
        "sequences that outgrow them when blocks have run out; default: for max_tokens",
        low=1e-6,
        high=1.0,
        unit="all lengths",
        metavar="Q",
    )
    reserve: float = option(
        0.1,
        "with a length quantile: requests start only while more than this share of an R-worker's "
        "KV blocks is free, which running ones may come to need",
        low=0.0,
        high=0.9,
        unit="all KV blocks",
        metavar="SHARE",
    )
    expected_output_tokens: int | None = option(
        None,
        "tokens that a sequence is expected to generate until enough have finished to learn it; "
        "default: its max_tokens",
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
        if self.length_quantile is not None and not self.learn_lengths:
            raise ConfigError(
                Given("length_quantile", self.length_quantile), " needs ", Given("learn_lengths")
            )
        if self.expected_output_tokens is not None and not self.learn_lengths:
            raise ConfigError(
                Given("expected_output_tokens", self.expected_output_tokens),
                " needs ",
                Given("learn_lengths"),
            )
        if self.schedule == "fixed-f" and self.target_length is None:
            raise ConfigError(
                "fixed intervals need ",
                Given("target_length"),
                ": tokens that a sequence typically generates",
            )

    @property
    def step_tokens(self) -> int:
        """``max_step_tokens`` with its default applied."""
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

    transport: str = option(
        "auto",
        "R-workers are: inproc (in this process), mpi (the job's other ranks), zmq (at addresses); "
        "auto: zmq if addresses are given, else mpi if a launcher started this process, else "
        "inproc",
        choices=TRANSPORTS,
        metavar="HOW",
    )
    r_worker_addresses: tuple[str, ...] = option(
        (),
        "an R-worker's address, tcp://HOST:PORT, where fastdecode r-worker --bind runs; repeatable",
        flag="--r-worker",
        metavar="ADDRESS",
    )
    key: str | None = option(
        None, "file with the cluster's key, for R-workers on other hosts; with zmq", metavar="FILE"
    )
    worker_silence_s: float = option(
        5.0,
        "give up an R-worker (mpi, zmq) that gives no sign of life for so long; those that "
        "compute do",
        low=0.5,
        high=3600,
        unit="s",
        metavar="S",
    )
    worker_timeout_s: float = option(
        300.0,
        "give up an R-worker that lives, but owes an answer for so long",
        low=1e-3,
        high=1e6,
        unit="s",
        metavar="S",
    )
    link_bytes: int = option(
        64 << 20,
        "with replicas: most bytes of K and V under way to an R-worker's neighbour, unanswered",
        low=1 << 16,
        high=1 << 30,
        unit="bytes",
    )
    min_r_workers: int = option(
        1,
        "start when so many R-workers (mpi, zmq) are there; over zmq the others are taken in when "
        "they come",
        low=1,
        high=MAX_R_WORKERS,
    )
    spare_r_workers: int = option(
        0,
        "R-workers that are idle until another one is lost, in whose place one of them comes then: "
        "the last N ranks of an MPI job; in this process, so many beside --r-workers",
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
        # What an address looks like is the transport's business; here, only
        # that there are some where there must.
        if self.transport == "zmq" and not addresses:
            raise ConfigError(
                Given("transport", "zmq"), " needs ", listed, ": tcp://HOST:PORT of each R-worker"
            )
        if self.transport in ("inproc", "mpi") and addresses:
            raise ConfigError(
                Given("transport", self.transport),
                " has no use for ",
                listed,
                ": leave them out, or use zmq",
            )
        if self.spare_r_workers and addresses:
            raise ConfigError(
                Given("spare_r_workers", self.spare_r_workers),
                " is for R-workers of an MPI job, or in this process: leave it out. With ",
                listed,
                " whoever comes at a lost one's address is taken in",
            )
