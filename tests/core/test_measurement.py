"""Profile files: what is written is read back; whatever else is in them is refused by name; and
what is odd about a profile is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fastdecode.core.errors import ConfigError
from fastdecode.core.measurement import (
    DecodePoint,
    Machine,
    ModelShape,
    NetProfile,
    Point,
    Profile,
    RProfile,
    SProfile,
    Timing,
    doubts,
    read_profile,
    write_profile,
)

MACHINE = Machine("a CPU", 2, 24 << 30, "cpu", {"numpy": "2.0"})
TIMING = Timing((1e-3, 1.1e-3, 0.9e-3))
POINTS = (Point(1, TIMING), Point(64, Timing((2e-3,))))
SHAPE = ModelShape(2, 64, 128, 4, 2, 16, 500)
S = SProfile(MACHINE, "tiny", SHAPE, "float32", 8 << 30, POINTS, POINTS, POINTS, POINTS, "s")
R = RProfile(
    MACHINE, 4, 2, 16, "float16", 32, 1, 2, 4 << 30, (DecodePoint(8, 512, TIMING),), (3e10, 3.1e10)
)
NET = NetProfile(MACHINE, "mpi", POINTS, TIMING, TIMING)


@pytest.mark.parametrize("profile", [S, R, NET], ids=["s", "r", "net"])
def test_round_trip(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    assert read_profile(path) == profile
    tree = json.loads(path.read_text())
    assert tree["format"] == "fastdecode.profile" and tree["version"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_timings() -> None:
    assert Timing((3.0, 1.0, 2.0)).median_s == 2.0
    assert Timing((5.0,)).spread == 0.0
    assert Timing((1.0, 1.0, 1.0, 1.0)).spread == 0.0
    assert Timing((0.9, 1.0, 1.1, 1.0, 1.0)).spread == 0.0
    assert Timing((0.8, 0.9, 1.0, 1.1, 1.2)).spread == pytest.approx(0.1)
    assert Timing((7.0,)).calm_s == 7.0
    assert Timing(tuple(float(i) for i in range(1, 12))).calm_s == pytest.approx(2.0)


def test_how_many_prompt_tokens_are_enough() -> None:
    """95 % of the best rate, from the fewest on."""
    seconds = {16: 1.0, 64: 1.2, 256: 4.5, 512: 9.0, 1024: 17.9, 2048: 40.0}
    prompts = tuple(Point(size, Timing((s,))) for size, s in seconds.items())
    assert replace(S, prefill=prompts).batch_tokens == 256
    assert replace(S, prefill=prompts[:1]).batch_tokens == 16


def change(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    node: Any = tree
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node[name]
    if value is None:
        del node[last]
    else:
        node[int(last) if isinstance(node, list) else last] = value
    return tree


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("format", "something", "format"),
        ("version", 1, '"version" is 1; this release reads 2'),
        ("prompt_attention", "x", r"\$\.prompt_attention"),
        ("kind", "x", "kind"),
        ("layer", None, "missing required field `layer`"),
        ("layer", [], r"length >= 1 - at `\$\.layer`"),
        ("layer", {}, r"Expected `array`, got `object` - at `\$\.layer`"),
        ("layer.0.timing.seconds.0", -1.0, r"> 0.* - at `\$\.layer\[0\]\.timing\.seconds\[0\]`"),
        ("layer.0.timing.seconds.0", float("nan"), r"> 0.*seconds\[0\]"),
        ("layer.0.timing.seconds.0", "fast", r"Expected `float`, got `str` - at .*seconds\[0\]"),
        ("layer.1.size", 6.5, r"Expected `int`, got `float` - at `\$\.layer\[1\]\.size"),
        ("layer.1.size", True, r"Expected `int`, got `bool` - at `\$\.layer\[1\]\.size"),
        ("shape.num_layers", 10**30, r"\$\.shape\.num_layers"),
        ("machine.software", {"numpy": 2}, r"`str`, got `int` - at `\$\.machine\.software"),
        ("machine", [], r"Expected `object`, got `array` - at `\$\.machine`"),
        ("model", "", r"\$\.model"),
        ("extra", 1, "unknown field `extra`"),
    ],
)
def test_broken_fields_are_named(tmp_path: Path, where: str, value: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, S)
    path.write_text(json.dumps(change(json.loads(path.read_text()), where, value)))
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(path)
    assert caught.value.code == "invalid_profile" and caught.value.exit_code == 2
    assert str(path) in str(caught.value) and "fastdecode calibrate" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"[" * 100_000, b"null"])
def test_files_that_are_no_profiles(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a usable profile"):
        read_profile(path)


def test_missing_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="can't read"):
        read_profile(tmp_path)
    with pytest.raises(ConfigError, match="can't write"):
        write_profile(tmp_path / "no" / "such" / "dir.json", NET)


CALM = (1.0, 1.01, 1.02)


def timing(median_s: float, spread: tuple[float, ...] = CALM) -> Timing:
    return Timing(tuple(median_s * each for each in spread))


def r_part(*decode: DecodePoint, ceiling: float = 1e10) -> RProfile:
    return RProfile(MACHINE, 8, 8, 64, "bfloat16", 64, 1, 1, 1 << 30, decode, (ceiling,))


def net(*transfer: Point) -> NetProfile:
    return NetProfile(MACHINE, "MPI", transfer, timing(1e-5), timing(1e-6))


def test_a_calm_machines_profile_is_not_doubted() -> None:
    points = [DecodePoint(n, c, timing(n * c * 1e-8)) for n in (1, 4) for c in (64, 256)]
    assert doubts(r_part(*points), bytes_per_s=1.5e10) == []
    assert doubts(net(Point(8, timing(1e-5)), Point(64, timing(0.95e-5)))) == []


def test_spreads_over_half_are_named() -> None:
    wide = Point(64, timing(2e-5, (0.2, 1.0, 3.0)))
    (said,) = doubts(net(Point(8, timing(1e-5)), wide))
    assert "transfer: 1 of 2 times spread by more than 50% (size 64: 70%)" in said


def test_times_that_fall_as_sizes_grow_are_named() -> None:
    decode = [
        DecodePoint(1, 64, timing(1e-5)),
        DecodePoint(4, 64, timing(5e-5)),
        DecodePoint(1, 256, timing(3e-5)),
        DecodePoint(4, 256, timing(2e-5)),
    ]
    (said,) = doubts(r_part(*decode))
    assert "times fall as sizes grow: 4 x 256 takes 0.40 of 4 x 64's" in said


@pytest.mark.parametrize(("times", "num"), [(1.9, 0), (30.0, 1), (float("inf"), 1)])
def test_a_rate_far_beyond_the_read_ceiling_is_named(times: float, num: int) -> None:
    profile = r_part(DecodePoint(1, 64, timing(1e-5)), ceiling=1e10)
    found = doubts(profile, bytes_per_s=times * 1e10)
    assert len(found) == num and all("the read ceiling of 10 GB/s" in each for each in found)
