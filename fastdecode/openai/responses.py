"""Answers of ``/v1/responses``: whole, and as the events of a stream."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastdecode.core.delta import Delta
from fastdecode.core.sequence import RequestOutput
from fastdecode.openai.answers import AnswerHead
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.calls import Call, Part, Reasoning
from fastdecode.text.chat_format import AnswerFormat
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import TokenText

Event = dict[str, Any]
_TEXT: Final = {"message": "output_text", "reasoning": "reasoning_text"}


def response_body(
    request: BodyRequest, outputs: Sequence[RequestOutput], codec: TextCodec, head: AnswerHead
) -> dict[str, Any]:
    """Return the ``response`` of a request with one prompt."""
    (output,) = outputs
    (completion,) = output.completions
    writer = ResponseWriter(request, [output.prompt_token_ids], codec, head)
    delta = Delta(
        output.request_id,
        0,
        completion.text,
        completion.token_ids,
        finish_reason=completion.finish_reason,
        num_cached_tokens=output.num_cached_tokens,
    )
    writer.add(delta)
    return writer.response()


@dataclass
class _Item:
    kind: str
    place: int
    item_id: str
    text: str = ""
    """A call's arguments."""
    name: str = ""
    call_id: str = ""

    def to_json(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.item_id, "type": self.kind}
        if self.kind == "function_call":
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {**item, **call, "status": status}
        parts = [self.part()] if status != "in_progress" else []
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": parts, "status": status}
        return {**item, "role": "assistant", "content": parts, "status": status}

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class ResponseWriter:
    """Writes one answer as a ``response``, and its deltas as events. There is one prompt."""

    def __init__(
        self,
        request: BodyRequest,
        prompts: Sequence[Sequence[int]],
        codec: TextCodec,
        head: AnswerHead,
    ) -> None:
        assert request.echo is not None, "the request is not for a response"
        (self._prompt,) = prompts
        self._format = request.answer_format or AnswerFormat()
        self._parser = self._format.parser(codec, self._prompt)
        self._answer_id = head.answer_id
        names = {"id": f"resp_{head.answer_id}", "object": "response"}
        self._head = {**names, "created_at": head.created_s, "model": head.model, **request.echo}
        self._open: _Item | None = None
        self._done: list[dict[str, Any]] = []
        self._blanks = ""
        """Text that begins no item by itself."""
        self._status = "in_progress"
        tokens = TokenText(codec.vocabulary_of(request.params))
        has_reasoning = self._format.reasoning is not None
        self._offset_of = tokens.offsets_after(self._prompt) if has_reasoning else None
        self._begins: list[int] = []
        """Where in the text each token begins, if some may be reasoning."""
        self._num_tokens = self._num_cached = self._num_events = 0

    def events(self, place: int, delta: Delta) -> str:
        """Return a delta's events, as a stream sends them."""
        first = []
        if not self._num_events:
            first = [self._whole("response.created"), self._whole("response.in_progress")]
        return "".join(map(self._sent, first + self.add(delta)))

    def end(self) -> str:
        return self._sent(self._whole(f"response.{self._status}"))

    def response(self) -> dict[str, Any]:
        """Return the ``response`` as it is by now."""
        is_cut = self._status == "incomplete"
        return {
            **self._head,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "output": list(self._done),
            "usage": None if self._status == "in_progress" else self._usage(),
        }

    def add(self, delta: Delta) -> list[Event]:
        """Return a delta's events, but for those that begin and end a stream."""
        self._num_tokens += len(delta.token_ids)
        if self._offset_of is not None:
            self._begins += map(self._offset_of, delta.token_ids)
        self._num_cached = max(self._num_cached, delta.num_cached_tokens)
        parts = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish()
        events = [event for part in parts for event in self._add(part)]
        if delta.finish_reason is not None:
            self._status = "completed" if delta.finish_reason == "stop" else "incomplete"
            if not self._done and self._open is None:  # an answer has an item
                events += self._begin("message")
            events += self._close(self._status)
        return events

    def _add(self, part: Part) -> list[Event]:
        if isinstance(part, Call):
            return self._add_call(part)
        kind, text = "message", part
        if isinstance(part, Reasoning):
            kind, text = "reasoning", part.text
        assert isinstance(text, str)
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            text = self._blanks + text
            self._blanks = "" if text.strip() else text
            if self._blanks:
                return []
            events = self._close("completed") + self._begin(kind)
        assert self._open is not None
        self._open.text += text
        return [*events, self._of_part(f"response.{_TEXT[kind]}.delta", delta=text)]

    def _add_call(self, call: Call) -> list[Event]:
        self._blanks = ""
        call_id = self._format.call_id(self._answer_id, call.index)
        events = self._close("completed")
        events += self._begin("function_call", name=call.name, call_id=call_id)
        events += [self._event("response.function_call_arguments.delta", delta=call.arguments)]
        assert self._open is not None
        self._open.text = call.arguments
        return events + self._close("completed")

    def _begin(self, kind: str, **more: str) -> list[Event]:
        place = len(self._done)
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self._open = item = _Item(kind, place, f"{prefix}_{self._answer_id}_{place}", **more)
        added: Event = {"type": "response.output_item.added", "output_index": place}
        events = [{**added, "item": item.to_json("in_progress")}]
        if kind != "function_call":
            events.append(self._of_part("response.content_part.added", part=item.part()))
        return events

    def _close(self, status: str) -> list[Event]:
        item, events = self._open, []
        if item is None:
            return []
        if item.kind == "function_call":
            kind = "response.function_call_arguments.done"
            events = [self._event(kind, arguments=item.text, name=item.name)]
        else:
            events = [
                self._of_part(f"response.{_TEXT[item.kind]}.done", text=item.text),
                self._of_part("response.content_part.done", part=item.part()),
            ]
        self._done.append(item.to_json(status))
        self._open = None
        done = {"type": "response.output_item.done", "output_index": item.place}
        return [*events, {**done, "item": self._done[-1]}]

    def _of_part(self, kind: str, **more: Any) -> Event:
        if kind.startswith("response.output_text."):
            more["logprobs"] = []
        return self._event(kind, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> Event:
        """Return an event of the open item."""
        assert self._open is not None
        item_id, place = self._open.item_id, self._open.place
        return {"type": kind, "item_id": item_id, "output_index": place, **more}

    def _whole(self, kind: str) -> Event:
        return {"type": kind, "response": self.response()}

    def _sent(self, event: Event) -> str:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    def _usage(self) -> dict[str, Any]:
        num_prompt = len(self._prompt)
        num_reasoning = bisect_left(self._begins, self._parser.num_reasoning_chars)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_prompt + self._num_tokens,
        }
