"""Models by name, in the local Hugging Face cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdecode.core.errors import CheckpointError
from fastdecode.core.model.checkpoint import check_model, open_checkpoint
from fastdecode.core.model.local_models import find_model, hub_cache
from fastdecode.server.options import ServeOptions

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the working directory is another."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hf" / "hub"


def add(cache: Path, name: str = "org--name", commit: str = COMMIT, ref: str = "main") -> Path:
    """A snapshot as the Hugging Face tools make it: files are links to blobs."""
    repository = cache / f"models--{name}"
    snapshot = repository / "snapshots" / commit
    for path in (snapshot, repository / "blobs", (repository / "refs" / ref).parent):
        path.mkdir(parents=True, exist_ok=True)
    if ref:
        (repository / "refs" / ref).write_text(commit)
    blob = repository / "blobs" / commit
    blob.write_text('{"architectures": ["LlamaForCausalLM"]}')
    (snapshot / "config.json").symlink_to(blob)
    return snapshot


def test_a_name_is_found_in_the_cache(cache: Path) -> None:
    snapshot = add(cache)
    assert find_model("org/name") == snapshot
    check_model("org/name")  # follows its links
    older = add(cache, commit=OTHER, ref="refs/pr/1")
    assert find_model("org/name") == snapshot
    assert find_model(f"org/name@{OTHER}") == older
    assert find_model("org/name@refs/pr/1") == older


def test_a_directory_has_precedence(cache: Path) -> None:
    add(cache)
    Path("org/name").mkdir(parents=True)
    assert find_model("org/name") == Path("org/name")


def test_paths_are_returned_as_they_are(cache: Path) -> None:
    for path in ("./org/name", "/a/b", "name", "a/b/c", "../name", Path("models") / "x" / "y"):
        assert find_model(path) == Path(path)


def test_where_the_cache_is(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hub_cache() == cache
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    snapshot = add(tmp_path / "other")
    assert find_model("org/name") == snapshot
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub_cache() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"


def test_the_only_snapshot_counts_without_a_branch(cache: Path) -> None:
    snapshot = add(cache, ref="v1")
    (cache / "models--org--name" / "refs" / "v1").unlink()
    assert find_model("org/name") == snapshot
    add(cache, commit=OTHER, ref="v2")
    with pytest.raises(CheckpointError, match=r"no snapshot of 'main'.*hf download org/name$"):
        find_model("org/name")


def test_what_is_not_there_is_refused_with_the_line_that_fetches_it(cache: Path) -> None:
    match = rf"org/name: .*{cache}/models--org--name\).*never downloaded.*hf download org/name$"
    for use in (find_model, check_model, open_checkpoint):
        with pytest.raises(CheckpointError, match=match):
            use("org/name")  # type: ignore[operator]
    add(cache)
    with pytest.raises(CheckpointError, match=r"no snapshot of 'v9'.*--revision v9$"):
        find_model("org/name@v9")


@pytest.mark.parametrize("written", ["../../../etc", "..", "", "a/b", "\x00", "é"])
def test_a_broken_branch_leads_nowhere_else(cache: Path, written: str) -> None:
    add(cache)
    add(cache, commit=OTHER, ref="v2")
    (cache / "models--org--name" / "refs" / "main").write_text(written)
    with pytest.raises(CheckpointError, match="no snapshot of 'main'"):
        find_model("org/name")
    with pytest.raises(CheckpointError, match="no snapshot"):
        find_model("org/name@../../../x")


def test_what_a_server_calls_a_model(cache: Path) -> None:
    options = ServeOptions()
    assert options.names("org/name") == options.names("org/name@v2") == ("org/name", "name")
    assert options.names("models/org/name") == ("name",)
    assert ServeOptions(served_model_name=("mine",)).names("org/name") == ("mine",)
    Path("org/name").mkdir(parents=True)
    assert options.names("org/name") == ("name",)
