"""Greetings between processes of different versions that speak one protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from messages_for_tests import between_instances, between_stages, from_r_worker, to_r_worker
from values import replace

from fastdecode import __version__
from fastdecode.wire.instances.messages import InstanceWelcome
from fastdecode.wire.messages import Hello, Welcome
from fastdecode.wire.stages import StageHello, StageWelcome


def first(kind: type[Any], messages: list[Any]) -> Any:
    return next(message for message in messages if isinstance(message, kind))


def check_r_worker(version: str) -> None:
    hello, welcome = first(Hello, to_r_worker()), first(Welcome, from_r_worker())
    hello.check(replace(welcome, block_size=hello.kv.block_size, version=version))


def check_stage(version: str) -> None:
    hello, welcome = first(StageHello, between_stages()), first(StageWelcome, between_stages())
    hello.check(replace(welcome, stage=hello.stage, version=version))


def check_instance(version: str) -> None:
    replace(first(InstanceWelcome, between_instances()), version=version).check()


GREETINGS = [check_r_worker, check_stage, check_instance]


@pytest.mark.parametrize("greet", GREETINGS)
def test_greeting_another_version_warns_with_both(
    greet: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    greet("9.8.7")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"runs fastdecode 9.8.7, this process {__version__}" in record.message


@pytest.mark.parametrize("greet", GREETINGS)
def test_greeting_the_same_version_is_silent(
    greet: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    greet(__version__)
    assert not caplog.records
