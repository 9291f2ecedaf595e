"""The data file: complete, sourced, never optimistic; and how names are found."""

from __future__ import annotations

from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest

from cost_model.hardware import Efficiency, Hardware, parse_toml
from fastdecode.core.errors import ConfigError

HARDWARE = Hardware.load()
GPUS = [
    "T4", "A10", "A10G", "L4", "L40S", "V100", "A100-40GB", "A100-80GB", "H100-PCIe",
    "H100-SXM", "H200", "RTX-3090", "RTX-4090", "MI300X", "L40", "H20", "GH200", "B200",
    "GB200", "B300", "GB300", "RTX PRO 6000", "MI325X", "MI355X", "H100-NVL", "RTX 5090",
    "A6000", "RTX 6000 Ada",
]  # fmt: skip
CPUS = [
    "EPYC-7452", "7742", "7763", "9354", "9654", "Xeon-8380", "8480+", "6980P", "Graviton3",
    "Graviton4", "Grace", "9755", "9965", "8592+", "6972P",
]  # fmt: skip
NICS = [
    "10GbE", "25GbE", "50GbE", "100GbE", "200GbE", "400GbE", "HDR100", "HDR", "NDR", "800GbE",
    "XDR", "EFA", "EFAv4",
]  # fmt: skip


@pytest.mark.parametrize("name", GPUS)
def test_gpus_are_listed(name: str) -> None:
    gpu = HARDWARE.gpu(name)
    assert 10e12 < gpu.fp16_flops_per_s < 3e15
    assert gpu.fp8_flops_per_s is None or 1.9 < gpu.fp8_flops_per_s / gpu.fp16_flops_per_s < 2.1
    assert 10 < gpu.fp16_flops_per_s / gpu.memory_bytes_per_s < 1000  # FLOPs a byte
    assert gpu.memory_bytes_per_s > gpu.peer_bytes_per_s >= gpu.pcie_bytes_per_s * 0.999


def test_cpus_and_nics_are_listed() -> None:
    for cpu in map(HARDWARE.cpu, CPUS):
        assert 100e9 < cpu.memory_bytes_per_s < 1e12
        assert 1e12 < cpu.fp32_flops_per_s < 30e12
    for nic in map(HARDWARE.nic, NICS):
        assert nic.bytes_per_s < nic.line_bits_per_s / 8


def test_stated_peaks() -> None:
    """Channels x 8 bytes x transfers, as the vendors multiply it out. Peaks are dense: the sparse
    figures that datasheets lead with are twice as large."""
    for name, flops_per_s in {"H100-SXM": 989e12, "A100": 312e12, "L4": 121e12}.items():
        assert HARDWARE.gpu(name).fp16_flops_per_s == flops_per_s
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


def test_the_newest_parts_say_where_their_figures_were_checked() -> None:
    """Read again on 2026-11-26; what was wrong then is asserted here."""
    tables = parse_toml(resources.files("cost_model").joinpath("hardware.toml").read_text("utf-8"))
    gpus = ["B200", "GB200", "B300", "GB300", "GH200", "H20", "L40", "MI325X", "MI355X"]
    cpus = ["Xeon 6980P", "Xeon 6972P", "Xeon 6787P", "Grace", "Graviton4"]
    for kind, names in (("gpu", [*gpus, "RTX PRO 6000"]), ("cpu", cpus), ("nic", ["XDR"])):
        assert all(tables[kind][name]["url"].startswith("https://") for name in names)
    b300, grace = HARDWARE.gpu("B300"), HARDWARE.cpu("Grace")
    assert b300.power_w == 1100 and b300.memory_bytes_per_s == 7.7e12, "HGX, not GB300"
    assert grace.memory_bytes < 240.1e9, "480 GB of LPDDR5X have 384 GB/s"
    assert HARDWARE.nic("EFAv4").line_bits_per_s == 2 * HARDWARE.nic("EFAv3").line_bits_per_s


@pytest.mark.parametrize(
    ("kind", "printed", "name"),
    [
        ("gpu", "a100", "A100-80GB"),
        ("gpu", "A100 80GB", "A100-80GB"),
        ("gpu", "A100-SXM4-80GB", "A100-80GB"),
        ("gpu", "NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("gpu", "NVIDIA H100 PCIe", "H100-PCIe"),
        ("gpu", "NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("gpu", "NVIDIA B300 SXM6 AC", "B300"),
        ("gpu", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("gpu", "Tesla V100-SXM2-16GB", "V100-16GB"),
        ("gpu", "AMD Instinct MI355X", "MI355X"),
        ("cpu", "AMD EPYC 7763 64-Core Processor", "EPYC 7763"),
        ("cpu", "Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", "Xeon 8380"),
        ("cpu", "INTEL(R) XEON(R) PLATINUM 8592+", "Xeon 8592+"),
        ("cpu", "Neoverse-V1", "Graviton3"),
        ("nic", "InfiniBand XDR", "XDR"),
    ],
)
def test_names_as_drivers_and_lscpu_print_them(kind: str, printed: str, name: str) -> None:
    assert getattr(HARDWARE, kind)(printed).name == name


MINE = """
[gpu."My card"]
like = "A10"
memory_mib = 49152
[cpu."EPYC 7452"]
memory_gib = 1024
[nic.slow]
source = "measured with iperf"
line_bits_per_s = 8e9
round_trip_s = 1e-4
round_trip_source = "measured with ping"
"""


def test_parts_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    mine = Hardware.load(file)
    assert mine.gpu("my card").memory_bytes == 48 << 30
    assert mine.gpu("my card").fp16_flops_per_s == HARDWARE.gpu("A10").fp16_flops_per_s
    assert mine.cpu("7452").memory_bytes == 1 << 40 and mine.cpu("7452").cores == 32
    assert mine.nic("slow").bytes_per_s == pytest.approx(0.9e9)
    assert mine.gpu("A10") == HARDWARE.gpu("A10")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "[gpu.x]\nmemory_mib = 1",
            "[gpu.x]: fp16_flops_per_s is missing; or say which part it is like",
        ),
        ('[gpu.x]\nlike = "A10"\npower_w = "much"', "power_w = 'much' is not a number"),
        ('[gpu.x]\nlike = "A10"\nspeed = 1', "[gpu.x]: speed is not known; there are aliases"),
        ('[gpu.x]\nlike = "A1O"', "Did you mean A10"),
        (
            '[cpu.x]\nlike = "EPYC 7452"\ncores = 0.5',
            "[cpu.x]: cores = 0.5 is not a whole number from 1 to 65536",
        ),
        ("[tpu.x]\npower_w = 1", "[tpu] is not one of [gpu.NAME], [cpu.NAME] and [nic.NAME]"),
        ("gpu = 3", "[gpu] is not one of"),
        ("[gpu]\nx = 3", "[gpu.x]: it must be a table"),
        ("[gpu.x", "it isn't valid"),
    ],
)
def test_parts_that_make_no_sense(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="hardware=") as caught:
        Hardware.load(file)
    assert why in caught.value.message


def test_each_number_of_a_part_has_bounds(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    named = {"memory_bytes": {"gpu": "memory_mib", "cpu": "memory_gib"}}
    for kind, name in (("gpu", "A10"), ("cpu", "EPYC 7452"), ("nic", "100GbE")):
        part = getattr(HARDWARE, kind)(name)
        names = {each for each, value in vars(part).items() if not isinstance(value, str)}
        for each in names - {"kernels"}:  # not a field of the file
            field = named.get(each, {}).get(kind, each)
            for value in ("1e300", "1e-300"):
                file.write_text(f'[{kind}.x]\nlike = "{vars(part)["name"]}"\n{field} = {value}\n')
                with pytest.raises(ConfigError, match=rf"\[{kind}\.x\]: {field} = .* from .* to "):
                    Hardware.load(file)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean H100-PCIe") as caught:
        HARDWARE.gpu("H100-PCI")
    assert caught.value.exit_code == 2 and caught.value.code == "unknown_gpu"
    with pytest.raises(ConfigError, match="Known: 10GbE"):
        HARDWARE.nic("carrier pigeon")


def test_faster_nics_are_of_the_same_kind() -> None:
    names = []
    nic = HARDWARE.nic("10GbE")
    while nic is not None:
        names.append(nic.name)
        nic = HARDWARE.faster_nic(nic)  # type: ignore[assignment]
    assert names == ["10GbE", "25GbE", "50GbE", "100GbE", "200GbE", "400GbE", "800GbE"]
    faster = HARDWARE.faster_nic(HARDWARE.nic("HDR100"))
    assert faster is not None and faster.name == "HDR"


def test_a_family_is_answered_with_its_parts() -> None:
    with pytest.raises(ConfigError, match=r"names a family.* EPYC 9755, EPYC 9965") as refused:
        Hardware.load().cpu("turin")
    assert "EPYC 9654" not in str(refused.value)
