"""Greetings between processes of different versions that speak one protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from messages_for_tests import (
    INSTANCE_WELCOME,
    STAGE_HELLO,
    STAGE_WELCOME,
    from_r_worker,
    to_r_worker,
)
from values import replace

from fastdecode import __version__
from fastdecode.engine.instances.registry import welcome_of
from fastdecode.wire.instances import InstanceHello
from fastdecode.wire.messages import Hello, Welcome


def check_r_worker(version: str) -> None:
    hello, welcome = (
        next(message for message in messages if isinstance(message, kind))
        for kind, messages in ((Hello, to_r_worker()), (Welcome, from_r_worker()))
    )
    hello.check(replace(welcome, block_size=hello.kv.block_size, version=version))


def check_stage(version: str) -> None:
    STAGE_HELLO.check(replace(STAGE_WELCOME, stage=STAGE_HELLO.stage, version=version))


def check_instance(version: str) -> None:
    welcome = replace(INSTANCE_WELCOME, version=version)
    line: Any = None
    assert welcome_of(line, InstanceHello(welcome.model_hash), welcome)


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
