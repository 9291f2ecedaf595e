"""Times of the S-part, the R-part and the network: from datasheets, or from measured profiles. They
differ in ``provenance`` alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Final, TypeAlias, TypeVar

from cost_model.hardware import Cpu, Gpu, Nic
from cost_model.workload import TokenCosts
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.measurement import ModelShape, NetProfile, RProfile, SProfile

TimeOf: TypeAlias = Callable[[float], float]

# Of the free memory of a measured device, what weights and activations may take.
MEASURED_MEMORY_USABLE = 0.95


class Provenance(str, Enum):
    """Where a number comes from. A plan is as good as its worst input."""

    MEASURED = "measured"
    DATASHEET = "datasheet"
    DEFAULT = "default"
    GIVEN = "given"

    def __str__(self) -> str:
        return self.value


def _mismatch(*words: str | Given) -> ConfigError:
    return ConfigError(*words, code="profile_mismatch")


_Own = TypeVar("_Own", bound="HardwarePart")


@dataclass(frozen=True)
class HardwarePart:
    """One part of the hardware, with the source and the error of its times."""

    name: str
    provenance: Provenance
    source: str
    relative_error: float = field(kw_only=True)
    pace: float = field(default=1.0, kw_only=True)
    """Multiplies every time, to ask what if it is slower or faster than thought."""

    def scaled(self: _Own, sign: int) -> _Own:
        return replace(self, pace=self.pace * (1.0 + self.relative_error) ** sign)


@dataclass(frozen=True)
class _Roofline:
    """GPUs of one node that share every layer, as peaks that they reach: seconds of the S-part."""

    gpu: Gpu
    num_gpus: int
    costs: TokenCosts

    @cached_property
    def flops_per_s(self) -> float:
        peak = self.gpu.flops_per_s(self.costs.dtype)
        return self.num_gpus * peak * self.gpu.compute_efficiency.value

    @cached_property
    def bytes_per_s(self) -> float:
        return self.gpu.memory_bytes_per_s * self.gpu.memory_efficiency.value

    def all_reduce_s(self, batch: float) -> float:
        if self.num_gpus == 1:
            return 0.0
        ring = 2 * (self.num_gpus - 1) / self.num_gpus
        num_bytes = batch * self.costs.spec.hidden_size * self.costs.dtype.size_bytes
        peer_bytes_per_s = self.gpu.peer_bytes_per_s * self.gpu.link_efficiency.value
        return self.gpu.all_reduce_s + ring * num_bytes / peer_bytes_per_s

    def layer_s(self, batch: float) -> float:
        busy_s = sum(count * self._busy_s(layer, batch) for layer, count in self.costs.layer_kinds)
        mean_s = busy_s / self.costs.num_layers
        return mean_s + self.gpu.layer_overhead_s + 2 * self.all_reduce_s(batch)

    @cached_property
    def _row_costs(self) -> dict[int, tuple[float, float]]:
        costs = self.costs
        return {
            layer: (costs.layer_activation_bytes(layer), costs.layer_flops(layer))
            for layer, _ in costs.layer_kinds
        }

    def _busy_s(self, layer: int, batch: float) -> float:
        activation_bytes, flops = self._row_costs[layer]
        weight_bytes = self.costs.layer_read_bytes(layer, batch) / self.num_gpus
        memory_s = (weight_bytes + activation_bytes * batch) / self.bytes_per_s
        return max(memory_s, flops * batch / self.flops_per_s)

    def head_s(self, batch: float) -> float:
        if not self.costs.has_ends:
            return 0.0
        logits_bytes = 8.0 * self.costs.spec.vocab_size * batch
        parameters = self.costs.head_parameters
        num_bytes = (parameters * self.costs.weights.others + logits_bytes) / self.num_gpus
        compute_s = 2.0 * parameters * batch / self.flops_per_s
        return max(num_bytes / self.bytes_per_s, compute_s) + self.gpu.layer_overhead_s

    def prompt_s(self, tokens: float) -> float:
        """Return the time of a prompt that joins a step, which reads the weights anyway."""
        attention_flops = self.costs.attention_flops * tokens * tokens / 2
        kinds = self.costs.layer_kinds
        flops = sum(count * self._row_costs[layer][1] for layer, count in kinds)
        layers_s = (flops * tokens + self.costs.num_layers * attention_flops) / self.flops_per_s
        return layers_s + self.costs.num_layers * 2 * self.all_reduce_s(tokens)


@dataclass(frozen=True)
class SPartModel(HardwarePart):
    num_layers: int
    layer_s: TimeOf
    """Time of one layer over tokens in the batch."""
    head_s: TimeOf
    """Time of the rest of a step over tokens in the batch: embedding, logits, sampling."""
    prompt_s: TimeOf
    """Time of all layers over the tokens of one prompt, its attention included."""
    usable_memory_bytes: float
    kv_read_bytes_per_s: float
    """At which attention on the GPU itself would read a KV cache."""
    host_link_bytes_per_s: float | None
    """PCIe, one direction; None if it is part of what was measured."""
    power_w: float | None
    max_batch: int | None = None
    """The largest batch that was measured. None for a formula."""
    prompts_on_r: bool = False
    """R-workers attend prompts: their q and o cross the network, too."""

    def t_of_b(self, batch: float) -> float:
        """Return T(B): seconds of one layer, with its share of the rest of a step."""
        return self.pace * (self.layer_s(batch) + self.head_s(batch) / self.num_layers)

    def prefill_s(self, prompt_tokens: float) -> float:
        return self.pace * self.prompt_s(prompt_tokens) if prompt_tokens > 0 else 0.0

    @classmethod
    def from_gpu(cls, gpu: Gpu, num_gpus: int, costs: TokenCosts) -> SPartModel:
        """Return a roofline over GPUs of one node that share every layer (tensor parallel)."""
        roof = _Roofline(gpu, num_gpus, costs)
        return cls(
            name=gpu.name if num_gpus == 1 else f"{num_gpus} x {gpu.name}",
            provenance=Provenance.DATASHEET,
            source=gpu.source,
            num_layers=costs.num_layers,
            layer_s=roof.layer_s,
            head_s=roof.head_s,
            prompt_s=roof.prompt_s,
            usable_memory_bytes=num_gpus * gpu.usable_memory_bytes,
            kv_read_bytes_per_s=num_gpus * roof.bytes_per_s,
            host_link_bytes_per_s=num_gpus * gpu.pcie_bytes_per_s * gpu.link_efficiency.value,
            power_w=None if gpu.power_w is None else num_gpus * gpu.power_w,
            relative_error=gpu.relative_error,
        )

    @classmethod
    def from_profile(cls, profile: SProfile, costs: TokenCosts) -> SPartModel:
        """Raises ConfigError: If the profile is of another model shape or dtype."""
        from cost_model.fit import fit_curve  # here: NumPy is slow to load

        asked = ModelShape.of(costs.spec)
        if profile.shape != asked:
            raise _mismatch(
                f"the S-part profile was measured for {profile.model} ({profile.shape}), but the "
                f"model is {costs.spec.name} ({asked}): calibrate with this model"
            )
        if profile.dtype != costs.dtype.value:
            words = f"in {profile.dtype}, but the plan asks for {costs.dtype}: use "
            use, again = Given("dtype", profile.dtype), ", or calibrate again"
            raise _mismatch(f"the S-part profile was measured {words}", use, again)
        layer, prompt = fit_curve(profile.layer), fit_curve(profile.prefill)
        head, step = fit_curve(profile.head), fit_curve(profile.step)
        return cls(
            name=profile.machine.device,
            provenance=Provenance.MEASURED,
            source=f"T(B) over {len(profile.step)} batch sizes in the engine, {step.form} fit, "
            f"error {step.relative_error:.1%}",
            num_layers=costs.num_layers,
            layer_s=layer,
            # The engine's own work is the difference: it isn't any layer's.
            head_s=lambda batch: max(head(batch), step(batch) - costs.num_layers * layer(batch)),
            prompt_s=prompt,
            usable_memory_bytes=profile.device_memory_bytes * MEASURED_MEMORY_USABLE,
            kv_read_bytes_per_s=costs.read_bytes(1) / costs.num_layers / layer(1),
            host_link_bytes_per_s=None,
            power_w=None,
            relative_error=step.relative_error,
            max_batch=min(
                max(point.size for point in points) for points in (profile.layer, profile.step)
            ),
            prompts_on_r=profile.prompt_attention == "r",
        )


@dataclass(frozen=True)
class RPartModel(HardwarePart):
    """The R-part of one layer on one R-worker: a CPU socket, or a measured host. Its pace leaves
    the read ceiling as it is."""

    call_s: float
    sequence_s: float
    token_s: float
    """R in the paper: time of one cached token."""
    read_token_s: float
    """Time of one cached token at the read ceiling: no kernel can be faster."""
    capacity_bytes: float
    memory_bytes: float
    sockets_per_host: int
    power_w: float | None

    def r_s(self, num_sequences: float, num_tokens: float) -> float:
        return self.pace * (
            self.call_s + self.sequence_s * num_sequences + self.token_s * num_tokens
        )

    @classmethod
    def from_cpu(cls, cpu: Cpu, costs: TokenCosts, memory_bytes: int | None = None) -> RPartModel:
        """Return a roofline over a socket: memory, or FMA units if many heads share K and V."""
        read_bytes_per_s = cpu.memory_bytes_per_s * cpu.read_efficiency.value
        read_token_s = costs.kv_layer_bytes / read_bytes_per_s
        peak = cpu.attention_peak(costs.kv_dtype, costs.group)
        compute_s = costs.attention_flops / (cpu.fp32_flops_per_s * peak.value)
        memory = memory_bytes or cpu.memory_bytes
        return cls(
            name=cpu.name,
            provenance=Provenance.DATASHEET,
            source=cpu.source,
            call_s=cpu.call_s,
            sequence_s=0.0,
            token_s=max(read_token_s / cpu.attention_efficiency.value, compute_s),
            read_token_s=read_token_s,
            capacity_bytes=memory * cpu.memory_usable.value,
            memory_bytes=memory,
            sockets_per_host=cpu.sockets_per_host,
            power_w=cpu.power_w,
            relative_error=cpu.relative_error,
        )

    @classmethod
    def of_device(cls, s: SPartModel, costs: TokenCosts) -> RPartModel:
        """Return GPUs that attend by themselves, to KV in the memory that the weights leave."""
        token_s = costs.kv_layer_bytes / s.kv_read_bytes_per_s
        room = s.usable_memory_bytes - costs.weight_bytes
        return cls(
            s.name, s.provenance, s.source, 0.0, 0.0, token_s, token_s, room, room, 1, s.power_w,
            relative_error=s.relative_error, pace=s.pace,
        )  # fmt: skip

    @classmethod
    def from_profile(cls, profile: RProfile, costs: TokenCosts) -> RPartModel:
        """Fit a line. An R-worker of the measured host counts as one socket. Raises ConfigError: If
        the profile is of another head shape or KV dtype."""
        from cost_model.fit import fit_decode

        spec = costs.spec
        measured = (profile.num_q_heads, profile.num_kv_heads, profile.head_dim)
        asked = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        if measured != asked:
            ours, theirs = ("{}/{} of {}".format(*heads) for heads in (measured, asked))
            raise _mismatch(
                f"the R-part profile was measured for {ours} (query heads / KV heads of head "
                f"size), but {spec.name} has {theirs}: calibrate with this model"
            )
        if profile.kv_dtype != costs.kv_dtype:
            words = f"a {profile.kv_dtype} KV cache, but the plan asks for {costs.kv_dtype}: use "
            use, again = Given("kv_dtype", profile.kv_dtype), ", or calibrate again"
            raise _mismatch(f"the R-part profile was measured with {words}", use, again)
        fit = fit_decode(profile.decode)
        read_token_s = costs.kv_layer_bytes / statistics.median(profile.read_bytes_per_s)
        return cls(
            name=profile.machine.cpu,
            provenance=Provenance.MEASURED,
            source=f"{len(profile.decode)} points, {profile.num_workers} x {profile.num_threads} "
            f"threads, fit error {fit.relative_error:.1%}",
            call_s=fit.call_s,
            sequence_s=fit.sequence_s,
            token_s=fit.token_s,
            read_token_s=min(read_token_s, fit.token_s) if fit.token_s > 0 else read_token_s,
            capacity_bytes=profile.memory_bytes,
            memory_bytes=profile.machine.memory_bytes,
            sockets_per_host=profile.num_workers,
            power_w=None,
            relative_error=fit.relative_error,
        )


@dataclass(frozen=True)
class LinkModel(HardwarePart):
    bytes_per_s: float
    """Payload each way, both at once."""
    round_trip_s: float
    """A small message there and back."""
    message_s: float
    """What one message out and its answer cost the S-worker's thread, the bytes aside."""

    def transfer_s(self, num_bytes: float) -> float:
        return self.pace * num_bytes / self.bytes_per_s

    @property
    def trip_s(self) -> float:
        return self.pace * self.round_trip_s

    @classmethod
    def within_process(cls) -> LinkModel:
        # What messages cost is in the S-part profile's steps.
        source = "R-workers are threads of the S-worker's process"
        far = float("inf")
        return cls("in one process", Provenance.GIVEN, source, far, 0.0, 0.0, relative_error=0.0)

    @classmethod
    def from_nic(cls, nic: Nic) -> LinkModel:
        return cls(
            name=nic.name,
            provenance=Provenance.DATASHEET,
            source=f"{nic.source}; round trip: {nic.round_trip_source}",
            bytes_per_s=nic.bytes_per_s,
            round_trip_s=nic.round_trip_s,
            message_s=nic.message_s,
            relative_error=nic.relative_error,
        )

    @classmethod
    def from_profile(cls, profile: NetProfile) -> LinkModel:
        from cost_model.fit import fit_curve

        curve = fit_curve(profile.transfer)
        largest = max(point.size for point in profile.transfer)
        slope = curve.last_slope or curve(largest) / largest
        whole_s = profile.round_trip.median_s
        message_s = min(profile.message.median_s, whole_s)
        return cls(
            name=profile.transport,
            provenance=Provenance.MEASURED,
            source=f"{len(profile.transfer)} message sizes over {profile.transport}",
            bytes_per_s=1.0 / slope,
            round_trip_s=whole_s - message_s,
            message_s=message_s,
            relative_error=max(curve.relative_error, profile.round_trip.spread),
        )


MAX_IO_THREADS: Final = 256
_LINK_SECURITY: Final = (
    "CPU time of an I/O thread, q, k, v of 256 rows of an 8B Llama out and o back on loopback "
    "(EPYC Zen 5)"
)


@dataclass(frozen=True)
class Transport:
    """The transport of messages, and its costs beside the network: ZeroMQ's I/O threads copy every
    byte, and with a key encrypt it."""

    name: str
    thread_bytes_per_s: float
    """Rate of one I/O thread, both directions together. Infinite if there are none."""
    work: str
    source: str
    num_threads: int = 1
    """Most I/O threads; never more than R-workers, as each connection has one."""

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.thread_bytes_per_s)

    def io_s(self, num_bytes: float, sockets: float) -> float:
        """Return seconds of the I/O threads for these bytes, out and back, of all R-workers."""
        if not self.is_bounded:
            return 0.0
        return num_bytes / (self.thread_bytes_per_s * min(self.num_threads, max(1.0, sockets)))


MPI: Final = Transport("mpi", math.inf, "", "MPI's own copies are part of what a NIC's figure says")
TRANSPORTS: Final = {
    "mpi": MPI,
    "zmq-encrypted": Transport("zmq-encrypted", 1.9e9, "encrypt", _LINK_SECURITY),
    "zmq-plain": Transport("zmq-plain", 7.0e9, "copy", _LINK_SECURITY),
}
