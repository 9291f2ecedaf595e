"""What holders receive before the first step: how they are greeted, and their replicas and lower
tiers, as these were configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from msgspec import structs

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.holders import HolderId
from fastdecode.core.model.block_keys import tier_identity
from fastdecode.core.model.checkpoint import Checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.weights_hash import weights_hash
from fastdecode.engine.fleet.greeting import use_tiers
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.pending import GREETING_TIMEOUT_S
from fastdecode.engine.fleet.replicas import Replicas, new_session, replicate
from fastdecode.engine.fleet.ring import DISK, LinkOptions
from fastdecode.engine.setup.resolve import ResolvedConfig, kept_by_rank
from fastdecode.engine.setup.workers import Reached
from fastdecode.engine.stages.pool import StagePool
from fastdecode.wire.messages import Hello, Welcome
from fastdecode.wire.stages import StageWelcome
from rworker.stream.mirror import LINK_BYTES
from sworker.ranks.group import Ranks
from sworker.swap.swapped import NUM_SLOTS

Welcomes = Mapping[HolderId, Welcome]


def make_hello(
    checkpoint: Checkpoint, spec: ModelSpec, resolved: ResolvedConfig, ranks: Ranks | None
) -> Hello:
    """Return what holders are greeted with: in a new session, where their caches are to
    outlive R-workers.

    S-workers that act as one, each with KV on its own device, offer the blocks that all of
    them have room for. Every rank takes part.
    """
    kv, attention = kept_by_rank(spec, resolved, 0)
    hello = Hello(
        checkpoint.model_hash,
        kv,
        attention,
        resolved.activation_dtype,
        session=new_session() if resolved.config.r_part.replicas else 0,
    )
    if ranks is None or resolved.transport != "local":
        return hello
    num_bytes = ranks.agree(resolved.memory.kv_bytes)[0]
    if resolved.config.r_part.swaps:
        num_bytes //= NUM_SLOTS  # a lane's
    return structs.replace(hello, max_blocks=max(1, num_bytes // kv.block_bytes))


def make_replicas(
    fleet: HolderPool, hello: Hello, welcomes: Welcomes, workers: Reached, config: EngineConfig
) -> tuple[dict[HolderId, Welcome], Replicas]:
    """Ask every holder to offer what leaves room for the replicas. With R-workers, a cache
    on the device has none.

    Raises:
        ConfigError, WorkerError: See ``replicate``.
    """
    keepers = keepers_of(workers, config)
    options = _options(hello.session, workers.addresses, config, keepers)
    circle = fleet.members.holders[: workers.num_holders]
    return replicate(fleet, hello, welcomes, options, circle=circle)


def make_stage_replicas(
    fleet: HolderPool,
    session: int,
    workers: Reached,
    config: EngineConfig,
    others: Seq[StageWelcome],
) -> Replicas:
    """The same, of each stage's R-workers, which have offered half of their room.
    ``others``: later stages."""
    assert isinstance(fleet.members, StagePool)
    members, rings = fleet.members, []
    stages = [(0, workers.addresses, session)]
    stages += [(other.stage, other.addresses, other.session) for other in others]
    for stage, addresses, each in stages:
        circle = [members.member(stage, column) for column in range(members.num_columns)]
        keepers = {
            members.member(stage, holder): DISK if keeper == DISK else members.member(stage, keeper)
            for holder, keeper in keepers_of(workers, config).items()
        }
        named = zip([*circle, *(x for x in keepers.values() if x != DISK)], addresses, strict=True)
        if stage:
            members.addresses.update(named)
        names = members.addresses if stage else addresses
        rings.append((circle, _options(each, names, config, keepers)))
    return Replicas(fleet, rings)


def keepers_of(workers: Reached, config: EngineConfig) -> Mapping[HolderId, HolderId]:
    """Return where each holder's replica is; see ``LinkOptions``."""
    if config.r_part.is_replicated_on_disk:
        return dict.fromkeys(map(HolderId, range(workers.num_holders)), DISK)
    return workers.keepers


def about_replicas(
    welcomes: Welcomes, again: Welcomes, workers: Reached, config: EngineConfig
) -> str:
    """Return what room replicas leave, for people."""
    keeps = "each R-worker keeps its neighbour's in as many"
    if config.r_part.is_replicated_on_disk:
        keeps = "they are in files"
    if workers.keepers:
        keeps = "the host's memory has a replica of all of them"
    num_blocks = sum(welcome.num_blocks for welcome in welcomes.values())
    offered = sum(welcome.num_blocks for welcome in again.values())
    return f"replicas: sequences have {offered} of {num_blocks} KV blocks; {keeps}"


def _options(
    session: int,
    addresses: Seq[str] | Mapping[HolderId, str],
    config: EngineConfig,
    keepers: Mapping[HolderId, HolderId],
) -> LinkOptions:
    timeout_s = config.cluster.worker_timeout_s
    # A device is the only holder: after its loss nothing could recompute.
    on_host = keepers and DISK not in keepers.values()
    begin_s = max(timeout_s, GREETING_TIMEOUT_S) if on_host else 0.0
    return LinkOptions(addresses, LINK_BYTES, timeout_s, session, keepers, begin_s)


def open_tiers(
    tell: Callable[[str], None],
    fleet: HolderPool,
    welcomes: Welcomes,
    resolved: ResolvedConfig,
    checkpoint: Checkpoint,
) -> None:
    """Open what holders keep beside their caches, for this very model: memory of this
    process, which need not know of weights, or a disk.

    Raises:
        CheckpointError: If the weights can't be read.
        ConfigError: If a disk was asked for, and no rank of the job has one.
    """
    holders, cache = [x for x, each in welcomes.items() if each.has_tier], resolved.config.cache
    if resolved.transport == "mpi" and cache.cache_disk is not None and not holders:
        raise ConfigError(
            Given("cache_disk"),
            " was given here, and no R-worker has a disk: those of a command of their own "
            "(fastdecode r-worker) are given --cache-disk, --cache-disk-gb and --kv-memory-gb "
            "there",
        )
    if not holders or not resolved.config.keeps_blocks:
        return
    identity = cache_identity(resolved, checkpoint)
    if cache.cache_memory_gb is not None:
        num_slots, _ = use_tiers(fleet, tier_identity(identity), holders)
        tell(f"kept blocks go to the host's memory, too: room for {num_slots}")
        return
    tell("kept blocks go to disk, too: reading all weights, which they depend on")
    found = tier_identity(f"{identity}/{weights_hash(checkpoint)}")
    num_slots, num_blocks = use_tiers(fleet, found, holders)
    tell(f"kept blocks on disk: {num_blocks} found, room for {num_slots}")


def cache_identity(resolved: ResolvedConfig, checkpoint: Checkpoint) -> str:
    """Return what K and V of a token depend on beside the tokens.

    The S-worker's kind of device is among it, since blocks on disk may be of another run: a GPU
    rounds otherwise than a CPU, in float32, too. What isn't: threads, kernels of one kind of
    device, and the side that attends prompts. They add the same numbers in another order, as
    other chunks of a prompt do, and in float32 a request's tokens don't depend on them.
    """
    device = resolved.device.type
    kv = f"{resolved.kv_dtype}{'' if resolved.kv_dtype.is_float else ', keys evened out'}"
    parts = (checkpoint.model_hash, resolved.dtype, kv, device)
    layers = [f"{each.start}:{each.stop}" for each in resolved.layers] * (len(resolved.layers) > 1)
    sizes = resolved.max_model_len, resolved.config.r_part.block_size
    return "/".join(map(str, (*parts, *sizes, *layers)))
