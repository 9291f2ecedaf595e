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
from server_process import TOOL_TALK, Server, model_server


class Person(BaseModel):
    """What is asked for."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    mood: Literal["calm", "angry"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("template") / "talk.jinja"
    path.write_text(TOOL_TALK)
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
        ({"response_format": {"type": "json_object", "schema": {}}}, "schema"),
        ({"response_format": {"type": "text", "foo": 1}}, "foo"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}}},
            "foo",
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


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Wien", "Graz"]
    days: int = Field(ge=1, le=9)


WEATHER: Any = openai.pydantic_function_tool(GetWeather)
NO_BLANKS = {"x-guidance": {"whitespace_pattern": ""}}  # or this model writes many
WEATHER["function"]["parameters"].update(NO_BLANKS)
NAMED = {"type": "function", "function": {"name": "GetWeather"}}


def test_a_required_call_is_parsed_by_the_helper(client: Any) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": "Weather?"}], seed=3,
        tools=[WEATHER], tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_streamed_call_is_the_whole_answers(client: Any) -> None:
    given = {"tools": [WEATHER], "tool_choice": NAMED, "n": 2}
    whole = ask(client, **given)
    calls: dict[int, dict[int, list[str]]] = {0: {}, 1: {}}
    reasons = {}
    for chunk in ask(client, **given, stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.content
        reasons[choice.index] = choice.finish_reason
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                assert call.type == "function" and call.id.startswith("call_")
                calls[choice.index][call.index] = [call.function.name, ""]
            calls[choice.index][call.index][1] += call.function.arguments
    assert reasons == {0: "tool_calls", 1: "tool_calls"}
    for choice in whole.choices:
        said = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert said == list(calls[choice.index].values())
        assert all(GetWeather(**json.loads(arguments)) for _, arguments in said)


def test_results_of_calls_reach_the_template(server: Server, client: Any) -> None:
    call = {"id": "c1", "type": "function",
            "function": {"name": "GetWeather", "arguments": '{"city": "Wien"}'}}  # fmt: skip
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    _, said = server.post("/tokenize", {"messages": messages, "return_token_strs": True})
    _, text = server.post("/detokenize", {"tokens": said["tokens"]})
    assert "GetWeather(Wien)" in text["prompt"] and "sunny" in text["prompt"]
    answer = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER])
    plain = client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens  # the tools were in it


def test_a_conversation_goes_on_after_a_call(client: Any) -> None:
    more = {"tools": [WEATHER], "extra_body": {"conversation_id": "with a call"}}
    first = ask(client, **more, tool_choice="required", parallel_tool_calls=False)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second = ask(client, **more, messages=[result], max_tokens=4)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_an_answer_is_a_call_or_the_format(client: Any) -> None:
    schema = {**Person.model_json_schema(), "additionalProperties": False, **NO_BLANKS}
    answer = ask(client, max_tokens=500, tools=[WEATHER], response_format={
        "type": "json_schema", "json_schema": {"name": "Person", "schema": schema}
    })  # fmt: skip
    message = answer.choices[0].message
    if message.tool_calls:
        assert GetWeather(**json.loads(message.tool_calls[0].function.arguments))
    else:
        assert Person(**json.loads(message.content))


def test_reasoning_is_apart_from_the_answer(client: Any) -> None:
    thinking = {"chat_template_kwargs": {"thinking": True}}
    (choice,) = ask(client, max_tokens=8, extra_body=thinking).choices
    assert choice.message.content == "" and choice.message.reasoning_content
    chunks = list(ask(client, max_tokens=8, extra_body=thinking, stream=True))
    said = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert "".join(filter(None, said)) == choice.message.reasoning_content
    (plain,) = ask(client, max_tokens=8).choices
    assert plain.message.content and not hasattr(plain.message, "reasoning_content")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [WEATHER], "guided_regex": "a"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]},
         "messages[0].tool_calls[0].function.name"),
    ],
)  # fmt: skip
def test_bad_tools_and_messages_are_refused(
    server: Server, body: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "x"}]
    status, said = server.post("/v1/chat/completions", {"messages": messages, **body})
    assert status == 400 and said["error"]["param"] == param, said


FLAT: Any = {"type": "function", "strict": True, **WEATHER["function"]}


def respond(client: Any, **more: Any) -> Any:
    given = {"model": "demo", "input": "Who are you?", "extra_body": {"seed": 3}, **more}
    return client.responses.create(**given)


def test_a_response_is_the_chats_answer(client: Any) -> None:
    response = respond(client, max_output_tokens=8, instructions="Be brief.", metadata={"a": "b"})
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens"
    )  # fmt: skip
    assert response.instructions == "Be brief." and response.metadata == {"a": "b"}
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}
    ]  # fmt: skip
    chat = ask(client, messages=messages, max_tokens=8)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 8


def test_a_response_of_a_format_is_parsed_by_the_helper(client: Any) -> None:
    response = client.responses.parse(model="demo", input="Who?", text_format=Person)
    assert isinstance(response.output_parsed, Person) and response.status == "completed"


def test_a_stream_of_events_is_the_whole_response(client: Any) -> None:
    thinking = {"seed": 3, "chat_template_kwargs": {"thinking": True}}
    for more in (
        {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False},
        {"max_output_tokens": 6},
        {"max_output_tokens": 6, "extra_body": thinking},
    ):
        whole = respond(client, **more)
        given = {"model": "demo", "input": "Who are you?", "extra_body": {"seed": 3}, **more}
        with client.responses.stream(**given) as stream:
            events = list(stream)
            last = stream.get_final_response() if whole.status == "completed" else None
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        assert events[-1].type == f"response.{whole.status}"
        streamed = last or events[-1].response
        changing = {"id", "call_id", "parsed_arguments", "parsed"}
        assert [item.model_dump(exclude=changing) for item in streamed.output] == [
            item.model_dump(exclude=changing) for item in whole.output
        ]
        kinds = [item.type for item in whole.output]
        assert len(kinds) == 1 and f"response.{EVENT_OF[kinds[0]]}.delta" in [
            event.type for event in events
        ]


EVENT_OF = {
    "message": "output_text", "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}  # fmt: skip


def test_items_of_earlier_responses_are_messages(server: Server) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "GetWeather", "id": "fc_1",
         "arguments": '{"city": "Wien"}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]  # fmt: skip
    call = {"id": "c1", "type": "function",
            "function": {"name": "GetWeather", "arguments": '{"city": "Wien"}'}}  # fmt: skip
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "t", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    body = {"input": items, "max_output_tokens": 4, "temperature": 0}
    status, response = server.post("/v1/responses", body)
    _, chat = server.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0}
    )
    assert status == 200
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_bad_bodies_of_responses_are_refused(
    server: Server, body: dict[str, Any], param: str
) -> None:
    status, said = server.post("/v1/responses", {"input": "x", **body})
    assert status == 400 and said["error"]["param"] == param, said
