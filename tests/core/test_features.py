"""Which features work together: the table, what an engine makes of it, and the page."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
from feature_examples import EXAMPLES, pairs

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.features import CONTRADICTIONS, FEATURES, NOT_YET, TRIPLES, features_on
from fastdecode.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MOST_NOT_BUILT = 5  # lower it with every pair that is built; it never grows


def options_of(*names: str) -> dict[str, Any]:
    """The fewest options that turn all of these on."""
    options: dict[str, Any] = {}
    for name in names:
        for option, value in EXAMPLES[name].items():
            options[option] = max(options.get(option, value), value) if option == "pp" else value
    if options.get("kv_placement") == "gpu" and "instance ranks" in names:
        options["instances"] = ("both:0", "both:0")  # no R-workers
    return options


@pytest.mark.parametrize("name", FEATURES)
def test_an_example_turns_its_feature_on(name: str) -> None:
    config = EngineConfig.of("dir", **options_of(name))
    assert name in features_on(config.options)
    assert name not in features_on(EngineConfig("dir").options)


@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_an_engine_refuses_what_the_table_refuses(one: str, other: str) -> None:
    if not {frozenset((one, other))} & {*CONTRADICTIONS, *NOT_YET}:
        EngineConfig.of("dir", **options_of(one, other))
    else:
        with pytest.raises(ConfigError, match="Remove "):
            EngineConfig.of("dir", **options_of(one, other))


def test_an_error_names_both_options_the_reason_and_the_mend() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of("dir", pp=2, kv_placement="hybrid")
    assert caught.value.message == (
        "pp=2 is not supported with kv_placement='hybrid' yet: beside R-workers, only the first "
        "S-worker would keep KV on its device. Remove one of them"
    )


def test_a_refused_pair_is_named_before_a_size_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="is not supported with cache_disk='DIR' yet"):
        EngineConfig.of("dir", kv_placement="gpu", cache_memory_gb=1.0, cache_disk="DIR")
    with pytest.raises(ConfigError, match="belong together"):
        EngineConfig.of("dir", cache_disk="DIR")


@pytest.mark.parametrize("option", ["dtype", "kv_dtype"])
def test_an_unknown_dtype_is_answered_with_all_that_an_option_takes(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}='float31' is not one of auto, float32"):
        EngineConfig.of("dir", **{option: "float31"})


@pytest.mark.parametrize(("names", "reason"), TRIPLES, ids=str)
def test_three_features_are_refused_of_which_any_two_work(
    names: tuple[str, str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f" yet: {reason}. Remove one of them"):
        EngineConfig.of("dir", **options_of(*names))
    for pair in itertools.combinations(names, 2):
        EngineConfig.of("dir", **options_of(*pair))


def test_pairs_that_are_not_built_do_not_grow_in_number() -> None:
    assert len(NOT_YET) <= MOST_NOT_BUILT
    assert not NOT_YET.keys() & CONTRADICTIONS.keys()
    assert all((*NOT_YET.values(), *CONTRADICTIONS.values()))


def test_reference_pages_are_what_the_declarations_say() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    for path, text in reference.pages().items():
        assert path.read_text("utf-8") == text, "run: python docs/reference.py"
