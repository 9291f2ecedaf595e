"""The data file: complete, sourced, never optimistic; and how names are found."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cost_model.hardware import Efficiency, Hardware
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError

HARDWARE = Hardware.load()
GPUS = [
    "T4", "A10", "A10G", "L4", "L40S", "V100", "A100-40GB", "A100-80GB", "H100-PCIe", "H100-SXM",
    "H200", "RTX-3090", "RTX-4090", "MI300X",
]  # fmt: skip
CPUS = [
    "EPYC-7452",
    "7742",
    "7763",
    "9354",
    "9654",
    "Xeon-8380",
    "8480+",
    "6980P",
    "Graviton3",
    "Graviton4",
]
NICS = ["10GbE", "25GbE", "50GbE", "100GbE", "200GbE", "400GbE", "HDR100", "HDR", "NDR"]


@pytest.mark.parametrize("name", GPUS)
def test_gpus_are_listed(name: str) -> None:
    gpu = HARDWARE.gpu(name)
    assert 10e12 < gpu.fp16_flops_per_s < 2e15
    assert 10 < gpu.fp16_flops_per_s / gpu.memory_bytes_per_s < 1000  # FLOPs a byte
    assert gpu.memory_bytes_per_s > gpu.peer_bytes_per_s >= gpu.pcie_bytes_per_s * 0.999


@pytest.mark.parametrize("name", CPUS)
def test_cpus_are_listed(name: str) -> None:
    cpu = HARDWARE.cpu(name)
    assert 100e9 < cpu.memory_bytes_per_s < 1e12
    assert 1e12 < cpu.fp32_flops_per_s < 20e12


@pytest.mark.parametrize("name", NICS)
def test_nics_are_listed(name: str) -> None:
    nic = HARDWARE.nic(name)
    assert nic.bytes_per_s < nic.line_bits_per_s / 8


def test_stated_bandwidths() -> None:
    """Channels x 8 bytes x transfers, as the vendors multiply it out."""
    stated = {
        "7452": 204.8e9,
        "9654": 460.8e9,
        "8480+": 307.2e9,
        "6980P": 614.4e9,
        "Graviton4": 537.6e9,
    }
    for name, bytes_per_s in stated.items():
        assert HARDWARE.cpu(name).memory_bytes_per_s == pytest.approx(bytes_per_s, rel=1e-9)


def test_every_entry_has_its_source_and_no_efficiency_is_one() -> None:
    for entry in (*HARDWARE.gpus.values(), *HARDWARE.cpus.values(), *HARDWARE.nics.values()):
        assert len(entry.source) > 15
        for field in fields(entry):
            value = getattr(entry, field.name)
            if isinstance(value, Efficiency):
                assert 0.3 <= value.value < 1.0 and value.source, f"{entry.name} {field.name}"


def test_peaks_are_dense() -> None:
    """The sparse figures that datasheets lead with are twice as large."""
    assert HARDWARE.gpu("H100-SXM").fp16_flops_per_s == 989e12
    assert HARDWARE.gpu("A100").fp16_flops_per_s == 312e12
    assert HARDWARE.gpu("L4").fp16_flops_per_s == 121e12


@pytest.mark.parametrize("name", ["a100", "A100 80GB", "nvidia A100-80GB", "A100-SXM4-80GB"])
def test_spelling_does_not_matter(name: str) -> None:
    assert HARDWARE.gpu(name).name == "A100-80GB"


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean H100-PCIe or H100-SXM") as caught:
        HARDWARE.gpu("H100-PCI")
    assert caught.value.exit_code == 2 and caught.value.code == "unknown_gpu"
    with pytest.raises(ConfigError, match="EPYC 7452"):
        HARDWARE.cpu("EPYC 7425")
    with pytest.raises(ConfigError, match="Known: 10GbE"):
        HARDWARE.nic("carrier pigeon")


def test_dtypes_a_gpu_has_not() -> None:
    with pytest.raises(ConfigError, match="no bfloat16"):
        HARDWARE.gpu("T4").flops_per_s(DType.BFLOAT16)
    with pytest.raises(ConfigError, match="float32"):
        HARDWARE.gpu("A100").flops_per_s(DType.FLOAT32)
    assert HARDWARE.gpu("T4").flops_per_s(DType.FLOAT16) == 65e12


def test_faster_nics_are_of_the_same_kind() -> None:
    names = []
    nic = HARDWARE.nic("10GbE")
    while nic is not None:
        names.append(nic.name)
        nic = HARDWARE.faster_nic(nic)  # type: ignore[assignment]
    assert names == ["10GbE", "25GbE", "50GbE", "100GbE", "200GbE", "400GbE"]
    faster = HARDWARE.faster_nic(HARDWARE.nic("HDR100"))
    assert faster is not None and faster.name == "HDR"
