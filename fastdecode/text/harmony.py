"""Answers of gpt-oss: messages in channels (OpenAI's harmony format).

``<|channel|>analysis<|message|>`` begins reasoning, ``final`` the answer, and
``commentary to=functions.NAME`` the arguments of a call. ``<|end|>`` ends a message, and
``<|start|>assistant`` begins the next one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from fastdecode.text.begun_stop import num_begun
from fastdecode.text.calls import MOST_HEAD_CHARS, Call, Divider, Part, Reasoning, arguments_text
from fastdecode.text.lark import calls_rules, marked, text_until
from fastdecode.text.tools import TOOL_FORMATS

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
START: Final = "<|start|>"
END: Final = "<|end|>"
_ENDS: Final = (END, "<|call|>", "<|return|>", START)
_MOST_END: Final = max(map(len, _ENDS))
_END_MARK: Final = re.compile("|".join(map(re.escape, _ENDS)))
_BEGINS: Final = (CHANNEL, START, " to=")
_CALLED: Final = re.compile(r"to=functions\.([\w.-]{1,256})")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(Divider[Part]):
    """Divides one answer into reasoning, text and calls. An answer without channels is text.

    Args:
        splits_reasoning: Reasoning is apart, and not text.
        most_calls: Later calls are left out.
        is_inside: The prompt ends inside the reasoning.
    """

    def __init__(self, *, splits_reasoning: bool, most_calls: int, is_inside: bool = False) -> None:
        mode = "body" if is_inside else "start"
        super().__init__(mode, start=self._in_start, head=self._in_head, body=self._in_body)
        self.num_reasoning_chars = self._num_read = 0
        self._splits_reasoning = splits_reasoning
        self._most_calls = most_calls
        self._called = ""
        self._kind: Literal["reasoning", "text", "call"] = "reasoning" if is_inside else "text"
        self._has_text = self._is_first_of_text = False
        self._num_scanned = 0

    @property
    def has_calls(self) -> bool:
        return min(self.num_calls, self._most_calls) > 0

    def _in_start(self, is_final: bool) -> bool:
        """Find out whether the answer begins with a message's head, or is text."""
        is_head = self._text.startswith(_BEGINS)
        if not (is_head or is_final) and any(mark.startswith(self._text) for mark in _BEGINS):
            return False
        self._mode = "head" if is_head else "body"
        return True

    def _in_head(self, is_final: bool) -> bool:
        head, mark, _ = self._text.partition(MESSAGE)
        if not mark and len(head) <= MOST_HEAD_CHARS:
            return False
        if mark:
            self._drop(len(head + mark))
        called = _CALLED.search(head) if mark else None
        channel = _CHANNEL.search(head)
        self._mode, self._kind = "body", "text"
        if called is not None and self._most_calls:
            self._kind, self._called, self._num_scanned = "call", called[1], 0
        elif channel is not None and channel[1] == "analysis" and self._splits_reasoning:
            self._kind = "reasoning"
        self._is_first_of_text = self._kind == "text"
        return True

    def _drop(self, num_chars: int) -> None:
        self._num_read += num_chars
        self._text = self._text[num_chars:]

    def _in_body(self, is_final: bool) -> bool:
        """Give a message's text as it comes, and a call once it is complete."""
        is_call = self._kind == "call"
        found = _END_MARK.search(self._text, self._num_scanned if is_call else 0)
        if found is None and is_call and not is_final:
            self._num_scanned = max(0, len(self._text) - _MOST_END)
            return False
        may_wait = found is None and not is_final
        num_held = max(num_begun(self._text, mark) for mark in _ENDS) if may_wait else 0
        end = len(self._text) - num_held if found is None else found.start()
        self._say(self._text[:end])
        self._drop(end)
        if found is not None:
            self._mode = "head"
            self._drop(0 if found[0] == START else len(found[0]))
        if self._kind == "reasoning" and not (self._has_text or self.num_calls):
            self.num_reasoning_chars = self._num_read
        return found is not None

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._kind == "reasoning":
            self._parts.append(Reasoning(text))
        elif self._kind == "call" and (arguments := arguments_text(text)) is not None:
            if self.num_calls < self._most_calls:
                self._parts.append(Call(self.num_calls, self._called, arguments))
            self.num_calls += 1
        else:
            is_later = self._is_first_of_text and self._has_text
            self._parts.append("\n" + text if is_later else text)
            self._has_text, self._is_first_of_text = True, False


def harmony_grammar(
    tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], answer: str | None
) -> str:
    """Return a Lark grammar of an answer of gpt-oss that may reason, and then is a call of one of
    the tools; or ``answer``, a rule of the final message's text, if it is given."""
    calls = calls_rules(TOOL_FORMATS["harmony"], tools, special, most_one=True)
    kinds = "calls" if answer is None else "calls | final"
    rules = [f"start: thoughts? ({kinds})", thoughts_rule(special), calls]
    if answer is not None:
        rules.insert(1, f"final: {final_head(special)} text\ntext: {answer}")
    return "\n".join(rules)


def thoughts_rule(special: Mapping[str, int], *, is_inside: bool = False) -> str:
    """Return a Lark rule ``thoughts`` for a message of reasoning, which may have begun in the
    prompt, up to the next one's head."""
    channel, message, start = (marked(name, special) for name in (CHANNEL, MESSAGE, START))
    head = "" if is_inside else f'{channel} "analysis" {message} '
    thoughts = f'thoughts: {head}thought {start} "assistant"'
    return f"{thoughts}\n{text_until('thought', END, special)}"


def final_head(special: Mapping[str, int]) -> str:
    """What stands before the final message's text, in Lark's terms."""
    return f'{marked(CHANNEL, special)} "final" {marked(MESSAGE, special)}'
