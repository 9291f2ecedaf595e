"""Structured outputs and tools over HTTP, by the ``openai`` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')
pytest.importorskip("openai", reason="needs a client: pip install openai")
pytest.importorskip("llguidance", reason="needs the extra 'structured'")

import openai
from pydantic import BaseModel, Field
from server_process import TALK, Server, model_server


class Person(BaseModel):
    """What is asked for."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    mood: Literal["calm", "angry"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("template") / "talk.jinja"
    path.write_text(TALK)
    with model_server("--chat-template", str(path), "--served-model-name", "demo") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60) as client:
        yield client


def ask(client: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": "Who are you?"}]
    given = {"model": "demo", "messages": messages, "max_tokens": 200, "seed": 3, **more}
    return client.chat.completions.create(**given)


def test_the_parse_helper_gives_an_object(client: Any) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": "Who?"}], response_format=Person, seed=3
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and person.mood in ("calm", "angry")


def test_json_mode_gives_an_object(client: Any) -> None:
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=400)
    choice = answer.choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    "body", [{"structured_outputs": {"regex": "[ab]{3}"}}, {"guided_regex": "[ab]{3}"}], ids=str
)
def test_vllms_fields(client: Any, body: dict[str, Any]) -> None:
    answer = client.completions.create(model="demo", prompt="Once", extra_body=body)
    assert len(answer.choices[0].text) == 3 and set(answer.choices[0].text) <= {"a", "b"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
            "response_format",
        ),
        ({"structured_outputs": {"json": {"$ref": "#/no"}}}, "structured_outputs"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_refusal_names_the_field(client: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=body)
    assert caught.value.param == param and param.split(".")[0] in str(caught.value)
