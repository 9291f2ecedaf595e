"""The batch job: answers every line of a file, and survives being killed at any moment.

There is one truth, the output: a line is done when its answer stands there (``journal``). The
manifest beside it says what the answers depend on, and a resumed job must agree with it
(``manifest``). A line's seed comes from the run's seed and the line's id, and its tokens depend on
nothing else. So a resumed run gives the answers of an undisturbed one.

Memory is flat: the input is read as there is room (``LLM.stream``), answers are written as they
come, and two bits of each line are kept (done, duplicate). The first pass needs 24 bytes a line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from fastdecode.conversations.conversations import Conversations, Keeping
from fastdecode.conversations.store import ConversationStore
from fastdecode.conversations.turns import (
    PREVIOUS_FAILED,
    History,
    Turn,
    TurnPrompt,
    TurnPrompter,
    after_a_failed_turn,
)
from fastdecode.core.errors import (
    CHILD_DIED,
    CapacityError,
    ConfigError,
    FastDecodeError,
    RequestError,
)
from fastdecode.core.progress import Progress
from fastdecode.core.sequence import PromptRequest, RequestOutput
from fastdecode.jobs.formats import LineError, LineFormat
from fastdecode.jobs.journal import Journal, OrderedOutput, Recovered
from fastdecode.jobs.lines import LineId, LineSource
from fastdecode.jobs.manifest import seed_of
from fastdecode.jobs.session import JobSession
from fastdecode.jobs.stopping import StopNow, Stopping
from fastdecode.jobs.survey import Survey
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import Chat, PromptOrChat

if TYPE_CHECKING:
    from fastdecode.engine.llm import LLM


_MAY_PASS: Final = (PREVIOUS_FAILED, CHILD_DIED)
"""Codes of errors that another run of the same line may not have."""
KEEP_ALL = Keeping(max_conversations=1 << 40)


@dataclass
class JobResult:
    num_lines: int
    num_done: int
    """Lines that are answered, now or in a run before, ``num_failed`` of them with an error."""
    num_failed: int
    num_bad: int = 0  # lines that fail in every run: bad ones, and prompts that are too long
    num_run: int = 0  # lines that were answered now
    num_run_failed: int = 0
    first_error: str | None = None
    """Error of the first line, in the input's order, that failed now."""
    lost: FastDecodeError | None = None  # failure of workers because of which lines are left
    interrupted: bool = False


@dataclass(frozen=True)
class AnswerRules:
    """What a job's answers depend on beside its lines."""

    run_seed: int
    template: ChatTemplate | None
    date: datetime
    answers_lost: bool = False
    """Answer lines whose workers were lost with that error: no other run will."""


class BatchJob:
    """A job that holds its output. ``opening`` makes it. Close it."""

    def __init__(
        self,
        source: LineSource,
        lines: LineFormat,
        rules: AnswerRules,
        found: Survey,
        output: Journal | OrderedOutput,
        recovered: Recovered,
        turns: ConversationStore | None = None,
        session: JobSession | None = None,
    ) -> None:
        self.session = session
        self._turns = turns
        self._conversations = None
        if turns is not None:
            self._conversations = Conversations(KEEP_ALL, turns, now=lambda: rules.date)
        self._failed_conversations: set[str] = set()
        self._source = source
        self._lines = lines
        self._rules = rules
        self._survey = found
        self._output = output
        self._done = recovered.done
        self._result = JobResult(found.num_lines, len(self._done), recovered.num_failed)
        self._num_hopeless = 0
        """Failed lines that the survey let pass, and that no other run can answer."""
        self._first_failed: int | None = None
        self._open: dict[int, tuple[BodyRequest, dict[int, RequestOutput]]] = {}
        """Lines whose prompts run, and outputs by the prompt's place in the line."""
        self._input_changed = False

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._rules.template is not None:
            self._rules.template.close()
        # An error while closing must not hide the original error.
        with contextlib.suppress(*([FastDecodeError] if error is not None else [])):
            if self._turns is not None:
                self._turns.close()
            self._output.close()
        self._source.close()
        if self.session is not None:
            # R-workers that ended with the job keep nothing for it.
            self.session.close(is_over=error is None and self._result.lost is None)

    @property
    def num_pending(self) -> int:
        return self._survey.num_lines - len(self._done)

    def result(self) -> JobResult:
        num_bad = min(self._result.num_failed, len(self._survey.bad) + self._num_hopeless)
        return replace(self._result, num_done=len(self._done), num_bad=num_bad)

    def run(self, llm: LLM, stopping: Stopping, progress: Progress) -> JobResult:
        """Answer what is left, until it is done, ``stopping`` is asked, or no R-worker is left.
        Raises ConfigError: If the input changed while it was read. Some answers may belong to lines
        that no longer exist. FastDecodeError: If the output can't be written (code
        ``output_failed``)."""
        progress.begin(self._survey.num_lines, len(self._done))
        self._output.begin()
        tokens_before = llm.stats.num_output_tokens
        withdrawn = False

        def on_tick() -> None:
            nonlocal withdrawn
            if stopping.now:
                raise StopNow
            if stopping.wanted and not withdrawn:
                withdrawn = True
                llm.cancel_waiting()
            self._output.sync_if_due()
            now = llm.snapshot().engine
            progress.update(
                done=len(self._done), num_failed=self._result.num_failed,
                num_tokens=llm.stats.num_output_tokens - tokens_before, workers=now.workers,
                num_running=min(now.num_running, len(self._open)),
            )  # fmt: skip

        with contextlib.suppress(StopNow):
            asked = self._requests(llm, stopping)
            for output in llm.stream(asked, on_tick, self._conversations):
                self._collect(output, llm)
        self._output.sync()
        self._result.interrupted = stopping.wanted and self.num_pending > 0
        if self._input_changed:
            raise ConfigError(
                f"{self._source} was changed while it was read: some answers may be to lines that "
                "are gone"
            )
        return self.result()

    def _requests(self, llm: LLM, stopping: Stopping) -> Iterator[PromptRequest | Turn]:
        """Yield the prompts of the lines that are left. Bad lines are answered here."""
        with self._source.open() as reader:
            for number, raw in reader:
                if number not in self._survey.shard:
                    continue
                if number in self._done:
                    self._note_done_turn(number, raw)
                    continue
                self._output.expect(number)
                for request in self._read(number, raw, llm):
                    if stopping.wanted:
                        return
                    yield request
                if stopping.wanted:
                    return
            self._input_changed = reader.sha256 != self._survey.sha256

    def _read(self, number: int, raw: bytes | None, llm: LLM) -> list[PromptRequest | Turn]:
        """Return a line's prompts, or answer it with an error and return none."""
        line_id: LineId | None = None
        conversation_id: str | None = None
        try:
            request = self._lines.parse(raw, number)
            line_id, conversation_id = request.line_id, request.conversation_id
            if number in self._survey.duplicates:
                name = self._lines.id_field
                text = f"an earlier line has this {name}: give each line one of its own"
                raise LineError(text, code=f"duplicate_{name}", param=name)
            asked = [
                self._asked(f"{number}.{index}", index, prompt, request, llm)
                for index, prompt in enumerate(request.prompts)
            ]
        except RequestError as error:
            if isinstance(error, LineError):
                line_id = line_id if error.line_id is None else error.line_id
                conversation_id = conversation_id or error.conversation_id
            if conversation_id is not None:
                self._failed_conversations.add(conversation_id)
            self._refuse(number, None, line_id, error)
            return []
        self._open[number] = request, {}
        return asked

    def _note_done_turn(self, number: int, raw: bytes | None) -> None:
        """Note a turn that failed in an earlier run: those after it fail, too."""
        if self._turns is None or str(number) in self._turns.names:
            return
        try:
            conversation_id = self._lines.parse(raw, number).conversation_id
        except LineError as error:
            conversation_id = error.conversation_id
        if conversation_id is not None:
            self._failed_conversations.add(conversation_id)

    def _asked(
        self, name: str, index: int, prompt: PromptOrChat, request: BodyRequest, llm: LLM
    ) -> PromptRequest | Turn:
        """Return a line's prompt as a request. A turn's is made when the turns before it are over.
        Raises RequestError: If the template can't write it."""
        template, date, params = self._rules.template, self._rules.date, request.params
        if params.seed is None:
            seed = seed_of(self._rules.run_seed, request.line_id, index)
            params = replace(params, seed=seed)
        if request.conversation_id is None:
            if isinstance(prompt, Chat):
                assert template is not None, "the reader refuses chats without a template"
                text = template.render(prompt.messages, date, prompt.how)
                prompt = llm.codec.encode(text, add_special_tokens=False)
            return PromptRequest(name, prompt, params, request.cache)
        has_failed = request.conversation_id in self._failed_conversations
        new = _refuse_later_turn if has_failed else TurnPrompter(prompt, llm.codec, template)
        number = name.partition(".")[0]
        return Turn(name, request.conversation_id, new, params, request.cache, number)

    def _collect(self, output: RequestOutput, llm: LLM) -> None:
        """Answer a line once all of its prompts are done, or one has failed."""
        number, index = map(int, output.request_id.split("."))
        request, outputs = self._open.get(number, (None, {}))
        if request is None:
            return  # another prompt of the line has failed
        if output.error is None:
            outputs[index] = output
            if len(outputs) == len(request.prompts):
                del self._open[number]
                ordered = [outputs[i] for i in range(len(outputs))]
                answer = self._lines.answer(number, request, ordered, llm.codec)
                self._write(number, output.prompt, answer, failed=False)
            return
        del self._open[number]
        is_lost = not isinstance(output.error, (RequestError, CapacityError))
        if is_lost:
            self._result.lost = output.error
        # A line whose workers were lost stays as it was, to be answered by a resumed job.
        if not is_lost or self._rules.answers_lost:
            self._refuse(number, output.prompt, request.line_id, output.error)

    def _refuse(
        self, number: int, prompt: str | None, line_id: LineId | None, error: FastDecodeError
    ) -> None:
        if self._first_failed is None or number < self._first_failed:
            named = "" if line_id is None else f" ({line_id!r})"
            self._first_failed = number
            self._result.first_error = f"line {number}{named}: {error.code}: {error}"
        is_hopeless = isinstance(error, RequestError) and error.code not in _MAY_PASS
        self._num_hopeless += is_hopeless and number not in self._survey.bad
        self._write(number, prompt, self._lines.refusal(number, line_id, error), failed=True)

    def _write(
        self, number: int, prompt: str | None, answer: dict[str, Any], *, failed: bool
    ) -> None:
        self._done.add(number)
        self._result.num_failed += failed
        self._result.num_run += 1
        self._result.num_run_failed += failed
        self._output.append(number, prompt, answer)


def _refuse_later_turn(history: History) -> TurnPrompt:
    raise after_a_failed_turn()
