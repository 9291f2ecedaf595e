"""Bodies of ``/v1/responses`` as bodies of ``/v1/chat/completions``.

Nothing is stored: a body brings all items of its conversation as ``input``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from fastdecode.openai.body_errors import BodyError, refuse, refuse_unknown

RESPONSES_URL: Final = "/v1/responses"
_SAME: Final = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stream",
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
    "chat_template_kwargs",
    "cache",
    "cache_salt",
)
"""Fields that a chat's body has, too, by the same name."""
_OWN: Final = (
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "max_output_tokens",
    "reasoning",
)
_NOT_SUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "store": (False,),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "prompt": (),
    "top_logprobs": (0,),
    "prompt_cache_retention": (),
    "stream_options": ({}, {"include_obfuscation": False}),
    "context_management": (),
}
"""Field → values that ask for nothing, besides null."""
_STATEFUL: Final = ("previous_response_id", "conversation")
_ECHOED: Final = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "temperature",
    "top_p",
    "user",
    "safety_identifier",
    "prompt_cache_key",
)
_NAMES: Final = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""A chat's field → the field that it was."""
_INVALID: Final = "invalid_input"
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
"""Types of parts that are text."""


def chat_of(body: Mapping[str, Any], sampling: Collection[str]) -> dict[str, Any]:
    """Return the body of a chat that asks the same. ``sampling`` are fields besides OpenAI's."""
    _check_fields(body, sampling)
    said = {name: body[name] for name in (*_SAME, *sampling) if body.get(name) is not None}
    said["messages"] = _messages(body)
    if body.get("max_output_tokens") is not None:
        said["max_completion_tokens"] = body["max_output_tokens"]
    tools = body.get("tools")
    said["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    said["tool_choice"] = _tool_choice(body.get("tool_choice"))
    said["response_format"] = _format(body.get("text"))
    effort = _effort(body.get("reasoning"))
    if effort is not None:
        given = said.get("chat_template_kwargs")
        kwargs = given if isinstance(given, dict) else {}
        said["chat_template_kwargs"] = {"reasoning_effort": effort, **kwargs}
    return said


def echo_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a response repeats of its request."""
    text = body.get("text") or {}
    return {
        **{name: body.get(name) for name in _ECHOED},
        "metadata": body.get("metadata") or {},
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "text": {"format": text.get("format") or {"type": "text"}},
        "reasoning": {"effort": _effort(body.get("reasoning")), "summary": None},
        "previous_response_id": None,
        "store": False,
        "background": False,
        "truncation": "disabled",
    }


def renamed(error: BodyError) -> BodyError:
    """Return a chat's error with the name that its field has in the response's body."""
    param, said = error.param, str(error)
    for name, own in _NAMES.items():
        if param is not None and (param == name or param.startswith((f"{name}.", f"{name}["))):
            own = own + param[len(name) :]
            return BodyError(said.replace(param, own, 1), code=error.code, param=own)
    return error


def _check_fields(body: Mapping[str, Any], sampling: Collection[str]) -> None:
    for name in _STATEFUL:
        if body.get(name) is not None:
            refuse(
                name,
                "is not supported, since no response is stored: give all items as input, with "
                "those of earlier responses",
                "unsupported_field",
            )
    for name, nothing in _NOT_SUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in nothing:
            refuse(name, "is not supported: leave it out", "unsupported_field")
    known = (*_SAME, *_OWN, *sampling)
    refuse_unknown(dict(body), known, (*_STATEFUL, *_NOT_SUPPORTED), "the body")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that items make. Calls, the text before them and the reasoning before
    that are one message of the assistant."""
    instructions, items = body.get("instructions"), body.get("input")
    made: list[dict[str, Any]] = []
    reasoning: str | None = None
    if not isinstance(instructions, (str, type(None))):
        refuse("instructions", "must be a string")
    if instructions is not None:
        made.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        refuse("input", "must be a string, or a list of items that isn't empty", _INVALID)
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            refuse(where, "must be an object", _INVALID)
        kind = item.get("type") or "message"
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            reasoning = "\n".join(_texts(parts, f"{where}.content")) or reasoning
            continue
        if kind == "message":
            made.append(_message(item, where))
        elif kind == "function_call_output":
            output = _content(item.get("output") or "", f"{where}.output")
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if reasoning is not None or not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": None})
            made[-1].setdefault("tool_calls", []).append(call)
        else:
            refuse(f"{where}.type", f"{kind!r:.80} is not supported", "unsupported_field")
        if reasoning and made[-1]["role"] == "assistant":
            made[-1]["reasoning_content"] = reasoning
        reasoning = None
    return made


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        refuse(f"{where}.role", "must be user, assistant, system or developer", _INVALID)
    role = "system" if role == "developer" else role
    content = item.get("content")
    if content is None and role == "assistant":
        content = ""
    return {"role": role, "content": _content(content, f"{where}.content")}


def _content(content: Any, where: str) -> str:
    return content if isinstance(content, str) else "\n".join(_texts(content, where))


def _texts(parts: Any, where: str) -> list[str]:
    if not isinstance(parts, list):
        refuse(where, "must be a string, or a list of parts", _INVALID)
    texts = []
    for place, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if not isinstance(text, str):
            refuse(
                f"{where}[{place}]",
                f"of type {kind!r:.80} is not supported: only text is",
                "unsupported_field",
            )
        texts.append(text)
    return texts


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return {"type": kind, "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = choice.get("tools")
        named = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def _format(text: Any) -> Any:
    if text is None:
        return None
    if not isinstance(text, dict):
        refuse("text", "must be an object")
    for name, value in text.items():
        if name != "format" and value is not None:
            refuse(f"text.{name}", "is not supported: leave it out", "unsupported_field")
    said = text.get("format")
    if not isinstance(said, dict) or said.get("type") != "json_schema":
        return said
    described = {name: value for name, value in said.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def _effort(reasoning: Any) -> str | None:
    if reasoning is None:
        return None
    if not isinstance(reasoning, dict):
        refuse("reasoning", "must be an object")
    for name, value in reasoning.items():
        if name not in ("effort", "summary", "generate_summary"):
            refuse(f"reasoning.{name}", "is unknown", "unknown_field")
        if name != "effort" and value not in (None, "auto"):
            refuse(f"reasoning.{name}", "is not supported: leave it out", "unsupported_field")
    effort = reasoning.get("effort")
    if not isinstance(effort, (str, type(None))):
        refuse("reasoning.effort", "must be a string")
    return effort
