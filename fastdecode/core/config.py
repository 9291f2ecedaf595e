"""What a user may choose about an engine. Frozen, and valid from construction on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError

MAX_R_WORKERS = 4096
MAX_TP = 64
R_PARTITIONS = ("sequences", "heads")
TRANSPORTS = ("auto", "inproc", "mpi", "zmq")
KV_PLACEMENTS = ("r", "gpu")
PROMPT_ATTENTION = ("auto", "s", "r")
CUDA_GRAPHS = ("auto", "on", "off")
_OF_R_WORKERS = (
    "tp", "r_workers", "r_partition", "r_worker_addresses", "transport", "prompt_attention", "split_tokens"
)  # fmt: skip


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. None means "decide for me"; ``resolve`` in the engine decides, in one place.

    Raises:
        ConfigError: names the option, its value, and what it may be.
    """

    model: str
    """A Hugging Face model directory."""
    dtype: str = "auto"
    """Of weights and activations; auto: the checkpoint's."""
    kv_dtype: str = "auto"
    """Of the KV cache on the R-workers, also int8 or int4; auto: like ``dtype``."""
    device: str = "cpu"
    """Where the S-part runs: cpu, cuda, cuda:1, …"""
    cuda_graphs: str = "auto"
    """Run S-steps as CUDA graphs: on, off or auto (on a CUDA device with tp=1)."""
    tp: int = 1
    """S-workers that act as one, each with a part of every layer: the first ranks of the MPI job."""
    kv_placement: str = "r"
    """Where the KV cache is: r (on R-workers) or gpu (on ``device``, whatever it is; then there are no R-workers)."""
    prompt_attention: str = "auto"
    """Who attends the tokens of prompts: s (the S-worker, merged with what R-workers make of earlier chunks) or r (the
    R-workers, like tokens that decode); auto: the S-worker if it has a GPU, else the R-workers, whose kernels are
    faster on a CPU than torch's."""
    transport: str = "auto"
    """How R-workers are reached: inproc (in this process), mpi (the job's other ranks) or zmq (processes at
    addresses); auto: zmq if addresses are given, else mpi if a launcher started this process, else inproc."""
    r_worker_addresses: tuple[str, ...] = ()
    """Where R-workers listen, tcp://HOST:PORT each; with zmq."""
    key: str | None = None
    """File with the cluster's key, for R-workers that aren't on this host; with zmq."""
    r_workers: int = 1
    """R-workers to start in this process: threads; a single one beside an S-part on the same cores works in the
    S-worker's own thread."""
    r_partition: str = "sequences"
    """What R-workers share out: sequences (each has whole ones) or heads (each has some KV heads of all sequences)."""
    split_tokens: int | None = None
    """Keep sequences that may get longer than this as parts of so many tokens on several R-workers, which attend them
    together; a multiple of ``block_size``. None: a sequence is on one R-worker."""
    r_threads: int | None = None
    """CPU threads of each R-worker; None: this machine's cores shared out among the R-workers."""
    kv_memory_gb: float | None = None
    """KV cache of each R-worker in GB (1e9 bytes); None: half of the memory that the S-part leaves free, shared out."""
    gpu_memory_fraction: float = 0.9
    """Of a CUDA device's memory, what may be in use, by this engine and whoever else is on it."""
    block_size: int = 64
    """Tokens in a KV block."""
    max_model_len: int | None = None
    """Most tokens of prompt and completion together; None: the model's own limit."""
    max_num_sequences: int = 256
    """Most sequences that run at once."""
    prefill_chunk: int = 512
    """Most prompt tokens of one sequence that one step runs; longer prompts take several steps."""
    max_step_tokens: int | None = None
    """Most tokens of all sequences that one step runs; None: max_num_sequences + max(2048, prefill_chunk)."""
    lanes: int | None = None
    """Parts of the running batch that take turns on the S-worker; None (auto): as many as pay by what steps turn out to
    take where S-part and R-part have hardware of their own, else 1."""
    schedule: str = "auto"
    """stabilized, fixed-f, greedy or synchronized (see ``fastdecode.schedule.modes``); auto: stabilized with two or
    more lanes, where S-part and R-part overlap, or if there is a ``load_limit``; else greedy."""
    load_limit: int | None = None
    """Most cached tokens over all running sequences, W_lim; None: what measured step times say."""
    target_length: int | None = None
    """Tokens that a sequence typically generates, S; fixed intervals need it."""
    interval: int | None = None
    """Steps between micro-batches, F, of fixed intervals; None: S/16, or S over a lane's sequences if that is more."""
    cold_start: str = "headroom"
    """How stabilized fills an empty lane: headroom, ramp, fixed-f or none."""
    learn_lengths: bool = True
    """Project load by the lengths of finished requests; else every sequence may run to its max_tokens."""
    length_quantile: float | None = None
    """Reserve KV blocks by this quantile of those lengths, not for max_tokens; sequences that outgrow them when blocks
    have run out are suspended and recomputed."""
    worker_silence_s: float = 5.0
    """An R-worker on another process that gives no sign of life for so long is given up: it hangs, or can't be reached.
    Those that compute do give signs of life."""
    worker_timeout_s: float = 300.0
    """How long to wait for the answer of an R-worker that does give signs of life before it is given up."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty: give the path of a Hugging Face model directory")
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) != "auto":
                DType.parse(getattr(self, name), option=name, of_kv=name == "kv_dtype")
        if self.r_partition not in R_PARTITIONS:
            raise ConfigError(f"r_partition={self.r_partition!r} is not one of {', '.join(R_PARTITIONS)}")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport={self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if self.cuda_graphs not in CUDA_GRAPHS:
            raise ConfigError(f"cuda_graphs={self.cuda_graphs!r} is not one of {', '.join(CUDA_GRAPHS)}")
        if self.kv_placement not in KV_PLACEMENTS:
            raise ConfigError(f"kv_placement={self.kv_placement!r} is not one of {', '.join(KV_PLACEMENTS)}")
        if self.prompt_attention not in PROMPT_ATTENTION:
            raise ConfigError(f"prompt_attention={self.prompt_attention!r} is not one of {', '.join(PROMPT_ATTENTION)}")
        self._check_addresses()
        self._check_int("tp", 1, MAX_TP)
        self._check_int("r_workers", 1, MAX_R_WORKERS)
        self._check_int("r_threads", 1, 4096)
        self._check_int("block_size", 16, 256)
        if self.block_size % 16:
            raise ConfigError(f"block_size={self.block_size} is not a multiple of 16, by which kernels read")
        self._check_split()
        self._check_placement()
        self._check_int("max_model_len", 1, 1 << 30)
        self._check_int("max_num_sequences", 1, 1 << 20)
        self._check_int("prefill_chunk", 1, 1 << 24)
        self._check_int("max_step_tokens", 2, 1 << 23)
        self._check_int("lanes", 1, 64)
        self._check_float("gpu_memory_fraction", 0.01, 1.0, "all memory")
        self._check_float("kv_memory_gb", 1e-6, 1e6, "GB")
        self._check_float("worker_silence_s", 0.5, 3600, "s")
        self._check_float("worker_timeout_s", 1e-3, 1e6, "s")
        if self.max_step_tokens is not None and self.max_step_tokens <= self.max_num_sequences:
            raise ConfigError(
                f"max_step_tokens={self.max_step_tokens} must exceed max_num_sequences="
                f"{self.max_num_sequences}: every running sequence decodes one token a step, and prompts need the rest"
            )

    def _check_addresses(self) -> None:
        """What an address looks like is the transport's business; here, only that there are some where there must."""
        addresses = self.r_worker_addresses
        if not isinstance(addresses, (list, tuple)) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError(f"r_worker_addresses={addresses!r} is not a list of addresses")
        object.__setattr__(self, "r_worker_addresses", tuple(addresses))
        if len(set(addresses)) < len(addresses) or len(addresses) > MAX_R_WORKERS:
            raise ConfigError(f"r_worker_addresses: give each address once, and {MAX_R_WORKERS} at most")
        if self.transport == "zmq" and not addresses:
            raise ConfigError("transport='zmq' needs r_worker_addresses: tcp://HOST:PORT of each R-worker")
        if self.transport in ("inproc", "mpi") and addresses:
            raise ConfigError(
                f"transport={self.transport!r} has no use for r_worker_addresses: leave them out, or use zmq"
            )
        for name in ("kv_memory_gb", "r_threads"):
            if addresses and getattr(self, name) is not None:
                option = "--" + {"r_threads": "threads"}.get(name, name).replace("_", "-")
                raise ConfigError(
                    f"{name} is for R-workers that this process starts; those at addresses have their own: give "
                    f"{option} to each fastdecode r-worker instead"
                )
        if self.key is not None and not addresses:
            raise ConfigError(f"key={self.key!r} is for R-workers at addresses: give r_worker_addresses too")

    def _check_split(self) -> None:
        self._check_int("split_tokens", 1, 1 << 30)
        if self.split_tokens is None:
            return
        if self.split_tokens % self.block_size:
            above = -(-self.split_tokens // self.block_size) * self.block_size
            raise ConfigError(
                f"split_tokens={self.split_tokens} is not a multiple of block_size={self.block_size}: take {above}"
            )
        if self.r_partition == "heads":
            raise ConfigError(
                "split_tokens is for R-workers that each have sequences; with r_partition='heads' each has a part of "
                "every sequence already: leave one of the two out"
            )

    def _check_placement(self) -> None:
        """With the KV cache on the device there are no R-workers; whoever asks for some expects others."""
        if self.kv_placement != "gpu":
            return
        for name in _OF_R_WORKERS:
            value = getattr(self, name)
            if value != _default(name) and (name, value) != ("prompt_attention", "s"):
                raise ConfigError(
                    f"{name}={value!r} is for R-workers, and kv_placement='gpu' has none: leave one of the two out"
                )

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is None and _may_be_none(name):
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name}={value!r} is not a whole number from {low} to {high}")

    def _check_float(self, name: str, low: float, high: float, unit: str) -> None:
        value = getattr(self, name)
        if value is None and _may_be_none(name):
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigError(f"{name}={value!r} is not a number of {unit} from {low:g} to {high:g}")

    @property
    def step_tokens(self) -> int:
        """``max_step_tokens`` with its default applied."""
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        return self.max_num_sequences + max(2048, self.prefill_chunk)


def _default(name: str) -> object:
    return next(f.default for f in fields(EngineConfig) if f.name == name)


def _may_be_none(name: str) -> bool:
    return _default(name) is None
