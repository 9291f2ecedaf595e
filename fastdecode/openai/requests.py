"""Bodies of OpenAI requests: what they ask, and what of it is refused.

``response_bodies`` turns a body for ``/v1/responses`` into a chat's. A field is one of

* what we do: ``FIELDS``;
* a label that changes no answer (``LABELS``);
* what we don't do (``NOT_SUPPORTED``): accepted with a value that asks for nothing (null, or as
  listed), else refused;
* unknown, and refused: a misspelt field must not be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastdecode.conversations.turns import check_turn
from fastdecode.core.errors import RequestError
from fastdecode.core.model.generation_defaults import with_defaults
from fastdecode.core.sequence import SHARED, CacheUse, SamplingParams
from fastdecode.core.structured import StructuredOutputs
from fastdecode.openai.body_errors import SHOWN, BodyError, blamed, blaming, refuse, refuse_unknown
from fastdecode.openai.response_bodies import RESPONSES_URL, chat_of, echo_of, renamed
from fastdecode.text.chat_format import AnswerFormat, ChatFormat
from fastdecode.text.chat_template import RESERVED
from fastdecode.text.chats import Chat, Message, PromptOrChat, Rendering, check_content
from fastdecode.text.tools import Tools

COMPLETIONS_URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
MAX_PROMPTS = 2048
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FORMAT_FIELDS = ("response_format", "structured_outputs", *_GUIDED_FIELDS)
_SCHEMA_FIELDS = ("schema", "name", "description", "strict")
FORMAT_TYPES = ("text", "json_object", "json_schema")

# Fields of SamplingParams that a body gives by the same name and in the same
# form; some are vLLM's additions to OpenAI's.
SAMPLING_FIELDS = tuple(
    f.name
    for f in fields(SamplingParams)
    if f.name not in ("logprobs", "logits_processors", "structured_outputs", "reasoning_marks")
)
FIELDS = {
    COMPLETIONS_URL: (
        "model", "prompt", *SAMPLING_FIELDS, *FORMAT_FIELDS, "logprobs", "return_token_ids",
        "cache", "cache_salt", "conversation_id",
    ),
    CHAT_URL: (
        "model", "messages", *SAMPLING_FIELDS, *FORMAT_FIELDS, "max_completion_tokens", "logprobs",
        "top_logprobs", "return_token_ids", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message", "reasoning_effort", "cache", "cache_salt", "conversation_id",
        *TOOL_FIELDS,
    ),
}  # fmt: skip
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "session_id")
# Field → values besides null that ask for nothing.
NOT_SUPPORTED: Mapping[str, Sequence[object]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "logits_processors": ([],),
    "logit_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (),
    "priority": (0,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "include_reasoning": (True,),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "logprob_token_ids": (),
    "kv_transfer_params": (),
    "stream_interval": (1,),
    "prompt_embeds": (),
}
STREAM_FIELDS = ("stream", "stream_options")
# OpenAI's obfuscation pads chunks to hide their sizes; we send none.
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
TEMPLATE_FIELDS = ("chat_template", "template", "tokenize")
INVALID_MESSAGES = "invalid_messages"
MAX_MESSAGES = 100_000
_MESSAGE_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal")
_MESSAGE_FIELDS = ("role", "content", *_MESSAGE_TEXTS, "tool_calls")
_EMPTY_FIELDS = ("function_call", "audio", "annotations")
"""Fields that a message may have if they are null or empty."""


@dataclass(frozen=True)
class BodyRequest:
    """What a body asks: prompts, all to be continued in the same way."""

    prompts: tuple[PromptOrChat, ...]
    params: SamplingParams
    is_chat: bool
    model: str | None = None
    want_token_ids: bool = False  # answer with the tokens' ids, too
    stream: StreamOptions | None = None
    """How to answer token by token. None to answer at once."""
    cache: CacheUse = SHARED
    conversation_id: str | None = None  # the conversation that the prompt continues
    format_field: str | None = None  # the field that gives the answer's format
    answer_format: AnswerFormat | None = None
    """What a chat's answer may have besides plain text. None if nothing."""
    echo: Mapping[str, Any] | None = None
    """What a response repeats of its request. None if it isn't for a response."""
    line_id: str | int = ""  # the id of the line that has the body, in a file of lines

    @property
    def prompt_field(self) -> str:
        """The field of the body that has the prompt."""
        if self.echo is not None:
            return "input"
        return "messages" if self.is_chat else "prompt"


@dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = False  # in an extra chunk at the end
    continuous_usage: bool = False  # in every chunk, so far


@dataclass(frozen=True)
class RequestReader:
    """Reads bodies into requests.

    Args:
        given: Sampling parameters for bodies without them, in place of OpenAI's defaults.
        is_online: The client is connected. Bodies may ask for streams, and what they give a
            template is bounded.
    """

    given: Mapping[str, Any]
    served_model_names: Sequence[str]
    has_chat_template: bool
    is_online: bool = False
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the model's generation_config.json recommends."""
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    """How the model writes calls and reasoning."""

    def read(self, url: str, body: dict[str, Any]) -> BodyRequest:
        """Return the request of a body that was posted to ``url``. Raises BodyError."""
        if url == RESPONSES_URL:
            return self._read_response(body)
        is_chat = url == CHAT_URL
        stream = _stream(body) if self.is_online else None
        _refuse_unsupported(body, url, STREAM_FIELDS if self.is_online else ())
        model = self.model_of(body)
        want_token_ids = _boolean(body, "return_token_ids") is True
        tools = chat = None
        if is_chat:
            with blaming(*TOOL_FIELDS):
                tools = Tools.of(*(body.get(name) for name in TOOL_FIELDS))
            chat = self._chat(body, tools)
        prompts = _prompts(body.get("prompt")) if chat is None else (chat,)
        structured, format_field = _format(body)
        params = self._params(body, structured, format_field, is_chat=is_chat)
        answer_format = None
        if chat is not None:
            with blaming(*TOOL_FIELDS):
                chat_format = self.chat_format.continuing(chat.how.continued(chat.messages))
                answer_format = chat_format.answer(tools)
                if answer_format is not None:
                    params = chat_format.params(params, tools)
            format_field = "tools" if tools is not None and tools.must_call else format_field
        if stream is not None and params.prompt_logprobs is not None:
            refuse("prompt_logprobs", "can't be streamed: leave out stream")
        with blaming("cache_salt", "cache"):
            cache = CacheUse.of(body.get("cache"), body.get("cache_salt"))
        with blaming(otherwise="conversation_id"):
            whose = check_turn(body.get("conversation_id"), params, len(prompts))
        return BodyRequest(
            prompts,
            params,
            is_chat,
            model,
            want_token_ids or not params.detokenize,
            stream,
            cache,
            whose,
            format_field,
            answer_format,
        )

    def _read_response(self, body: dict[str, Any]) -> BodyRequest:
        others = [name for name in SAMPLING_FIELDS if name not in ("max_tokens", "n")]
        chat = chat_of(body, others)
        try:
            asked = self.read(CHAT_URL, chat)
        except BodyError as error:
            raise renamed(error) from None
        format_field = asked.format_field
        if format_field == "response_format":
            format_field = "text.format"
        return replace(asked, echo=echo_of(body), format_field=format_field)

    def model_of(self, body: dict[str, Any]) -> str | None:
        """Return the model that a body names. Raises BodyError: If it isn't served."""
        model: str | None = body.get("model")
        if model is not None and model not in self.served_model_names:
            names = ", ".join(self.served_model_names)
            refuse(
                "model",
                f"{str(model)[:SHOWN]!r} isn't served here, only {names}: see --served-model-name",
                "model_mismatch",
            )
        return model

    def _params(
        self,
        body: dict[str, Any],
        structured: StructuredOutputs | None,
        format_field: str | None,
        *,
        is_chat: bool,
    ) -> SamplingParams:
        # null is the same as not given
        said = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
        if is_chat:
            said.update(_chat_params(body))
        elif body.get("logprobs") is not None:
            said["logprobs"] = body["logprobs"]
        if structured is not None:
            said["structured_outputs"] = structured
        chosen = with_defaults(self.model_defaults, self.given, said)
        if is_chat:
            chosen.setdefault("max_tokens", None)
        try:
            return SamplingParams(**chosen)
        except RequestError as error:
            param = blamed(error, said)
            param = format_field if param == "structured_outputs" else param
            raise BodyError(str(error), code=error.code, param=param) from None

    def _chat(self, body: dict[str, Any], tools: Tools | None) -> Chat:
        if not self.has_chat_template:
            text = (
                "can't be rendered, as the model has no chat template: give one by "
                "--chat-template, or use /v1/completions"
            )
            refuse("messages", text, "no_chat_template")
        variables = body.get("chat_template_kwargs")
        if variables is not None and not isinstance(variables, dict):
            refuse("chat_template_kwargs", "must be an object")
        for name, value in (variables or {}).items():
            if name in RESERVED:
                why = f"can't say {name!r}, which the template is given anyway"
                refuse("chat_template_kwargs", why)
            if self.is_online and (name in TEMPLATE_FIELDS or isinstance(value, (dict, list))):
                known = "only texts, numbers, true, false and null, and no template"
                refuse("chat_template_kwargs", f"can't say {name!r}: {known}")
        messages, effort = read_messages(body.get("messages")), body.get("reasoning_effort")
        begins_turn = _boolean(body, "add_generation_prompt")
        continues = _boolean(body, "continue_final_message") is True
        if not isinstance(effort, str | None):
            refuse("reasoning_effort", "must be a string")
        if effort is not None:
            variables = {"reasoning_effort": effort, **(variables or {})}
        with blaming("continue_final_message"):
            definitions = () if tools is None else tools.definitions
            how = Rendering.of(begins_turn, continues, variables, definitions)
        return Chat(messages, replace(how, style=self.chat_format.style))


def _boolean(body: dict[str, Any], name: str, more: str = "") -> bool | None:
    value: bool | None = body.get(name)
    if not isinstance(value, (bool, type(None))):
        refuse(name, "must be true or false" + more)
    return value


def _stream(body: dict[str, Any]) -> StreamOptions | None:
    wanted = _boolean(body, "stream") is True
    options = body.get("stream_options")
    if options is None:
        return StreamOptions() if wanted else None
    if not wanted:
        refuse("stream_options", "needs stream: true")
    if not isinstance(options, dict):
        refuse("stream_options", "must be an object")
    for name, value in options.items():
        if name not in STREAM_OPTIONS:
            known = ", ".join(STREAM_OPTIONS)
            refuse(f"stream_options.{name}", f"is unknown: known are {known}", "unknown_field")
        if value is not None and not isinstance(value, bool):
            refuse(f"stream_options.{name}", "must be true or false")
    if options.get("include_obfuscation"):
        field = "stream_options.include_obfuscation"
        refuse(field, "is not supported: leave it out", "unsupported_field")
    continuous = options.get("continuous_usage_stats") is True
    return StreamOptions(options.get("include_usage") is True, continuous)


def _refuse_unsupported(body: dict[str, Any], url: str, also: Sequence[str]) -> None:
    """Raise BodyError for unknown and unsupported fields. Those in ``also`` are allowed."""
    asks_nothing: Mapping[str, Sequence[object]] = {
        "best_of": [body.get("n") or 1],
        # Prompts have them, chats have what the template writes.
        "add_special_tokens": [url == COMPLETIONS_URL],
    }
    for name, value in body.items():
        nothing = asks_nothing.get(name, NOT_SUPPORTED.get(name))
        is_asked = nothing is not None and value is not None and value not in nothing
        if is_asked and name not in also:
            refuse(name, "is not supported: leave it out", "unsupported_field")
    its_url = COMPLETIONS_URL if url == CHAT_URL else CHAT_URL
    for name in body:
        if name in FIELDS[its_url] and name not in FIELDS[url]:
            refuse(name, f"belongs to {its_url}, not to {url}", "unknown_field")
    refuse_unknown(body, (*FIELDS[url], *also, *LABELS), NOT_SUPPORTED, "the body")


def _prompts(prompt: object) -> tuple[PromptOrChat, ...]:
    """Return one prompt or several, each text or token ids."""
    kinds = {type(each) for each in prompt} if isinstance(prompt, list) else {type(prompt)}
    if isinstance(prompt, str) or (isinstance(prompt, list) and kinds == {int}):
        return (prompt,)
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS:
        most = f"may have {MAX_PROMPTS} prompts, not {len(prompt)}: make more lines of them"
        refuse("prompt", most)
    if not isinstance(prompt, list) or kinds not in ({str}, {list}):
        must = "must be a string, a list of token ids, or a list of either that isn't empty"
        refuse("prompt", must, "invalid_prompt")
    return tuple(prompt)


def _chat_params(body: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters that a chat gives in another form."""
    wanted = _boolean(body, "logprobs", " in a chat; how many is top_logprobs")
    top, most = body.get("top_logprobs"), body.get("max_completion_tokens")
    if top and not wanted:
        refuse("top_logprobs", "needs logprobs: true")
    if most is not None and body.get("max_tokens") not in (None, most):
        refuse("max_completion_tokens", "and max_tokens, its older name, differ: give one of them")
    said = {} if wanted is None else {"logprobs": (top or 0) if wanted else None}
    return said if most is None else {**said, "max_tokens": most}


def _format(body: Mapping[str, Any]) -> tuple[StructuredOutputs | None, str | None]:
    """Return the answer's required format, and the field that gives it. Raises BodyError."""
    given = [name for name in FORMAT_FIELDS if body.get(name) is not None]
    if "response_format" in given and _format_type(body["response_format"]) == "text":
        given.remove("response_format")
    if not given:
        return None, None
    if len(given) > 1:
        refuse(given[1], f"and {given[0]} say both what the answer must be: give one of them")
    (name,) = given
    wanted = body[name]
    if name == "response_format":
        wanted = _of_response_format(wanted)
    elif name != "structured_outputs":
        wanted = {name.removeprefix("guided_"): wanted}
    with blaming(otherwise=name):
        return StructuredOutputs.of(wanted), name


def _of_response_format(value: Any) -> dict[str, Any]:
    """Return a format as ``StructuredOutputs.of`` takes it."""
    if _format_type(value) == "json_object":
        return {"json_object": True}
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, (dict, bool, str)):
        refuse("response_format.json_schema", 'must be an object with a "schema", a JSON schema')
    refuse_unknown(described, _SCHEMA_FIELDS, (), "response_format.json_schema")
    return {"json": schema}


def _format_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMAT_TYPES:
        refuse("response_format.type", f"must be one of {', '.join(FORMAT_TYPES)}")
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    given = {name: each for name, each in value.items() if each is not None}
    refuse_unknown(given, known, (), f"response_format of the type {kind}")
    return str(kind)


def read_messages(messages: object) -> list[Message]:
    """Return a chat's messages, checked. Raises BodyError."""
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        refuse("messages", "must be a list with at least one message", INVALID_MESSAGES)
    return [_message(each, f"messages[{place}]") for place, each in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        refuse(where, "must be an object", INVALID_MESSAGES)
    _check_fields(message, where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        refuse(f"{where}.role", "must be a string", INVALID_MESSAGES)
    if role == "function":
        refuse(f"{where}.role", "'function' is not supported: use 'tool'", "unsupported_field")
    calls = message.get("tool_calls") or []
    if calls and role != "assistant":
        refuse(f"{where}.tool_calls", "belongs to messages of the assistant", INVALID_MESSAGES)
    with blaming(otherwise=f"{where}.content"):
        check_content(message, where, is_strict=True)
    names = ("role", "content", *_MESSAGE_TEXTS)
    given = {name: message[name] for name in names if message.get(name) is not None}
    plain: dict[str, Any] = {"content": "", **given}
    if role == "tool":
        plain["tool_call_id"] = _call_id(message.get("tool_call_id"), f"{where}.tool_call_id")
    if calls and not isinstance(calls, list):
        refuse(f"{where}.tool_calls", "must be a list", INVALID_MESSAGES)
    if calls:
        places = (f"{where}.tool_calls[{place}]" for place in range(len(calls)))
        plain["tool_calls"] = [_call(*each) for each in zip(calls, places, strict=True)]
    return plain


def _check_fields(message: Mapping[str, Any], where: str) -> None:
    for name, value in message.items():
        if name in _EMPTY_FIELDS:
            if value:
                refuse(f"{where}.{name}", "is not supported: leave it out", "unsupported_field")
        elif name not in _MESSAGE_FIELDS and value is not None:
            known = ", ".join(_MESSAGE_FIELDS)
            refuse(f"{where}.{name}", f"is unknown: a message has {known}", "unknown_field")
    for name in _MESSAGE_TEXTS:
        if not isinstance(message.get(name), (str, type(None))):
            refuse(f"{where}.{name}", "must be a string", INVALID_MESSAGES)


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        refuse(where, 'must be an object with a "function"', INVALID_MESSAGES)
    if call.get("type") not in ("function", None):
        refuse(f"{where}.type", 'must be "function"', "unsupported_field")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"{where}.function.name", "must be a string", INVALID_MESSAGES)
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        refuse(f"{where}.function.arguments", "must be a JSON object, as text", INVALID_MESSAGES)
    return {
        "id": _call_id(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _call_id(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(where, "must be a string, the call's id", INVALID_MESSAGES)
    return value
