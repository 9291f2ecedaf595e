"""The batch job: answers every line of a file, and survives being killed at any
moment.

What makes it so is that there is one truth, the output: a line is done when its
answer stands there (``journal``). The manifest beside it says what the answers
depend on; a resumed job must agree with it (``manifest``). A line's seed comes
from the run's seed and the line's id, and its tokens depend on nothing else, so
a resumed run says what an undisturbed one would have said.

Memory is flat: the input is read as there is room (``LLM.stream``), answers are
written as they come, and what is kept of a line beyond that is two bits (done,
duplicate). Only the first pass needs 24 bytes a line, to find duplicates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastdecode.conversations.conversations import ConversationLimits, Conversations
from fastdecode.conversations.history import History
from fastdecode.conversations.store import ConversationStore
from fastdecode.conversations.turns import (
    PREVIOUS_FAILED,
    ChatTurn,
    Prompter,
    PromptTurn,
    Turn,
    TurnPrompt,
    after_a_failed_turn,
)
from fastdecode.core.answer_lengths import EndedAnswers
from fastdecode.core.errors import (
    CHILD_DIED,
    CapacityError,
    ConfigError,
    FastDecodeError,
    RequestError,
)
from fastdecode.core.progress import Progress
from fastdecode.core.sequence import Prompt, PromptRequest, RequestOutput, SamplingParams
from fastdecode.jobs.journal import Recovered
from fastdecode.jobs.line_format import LineError, LineFormat, LineId, LineRequest
from fastdecode.jobs.line_source import LineSource
from fastdecode.jobs.lines import LineReader, too_long
from fastdecode.jobs.session import JobSession
from fastdecode.jobs.stopping import StopNow, Stopping
from fastdecode.jobs.survey import Survey
from fastdecode.openai.chat import Chat
from fastdecode.openai.chat import Turn as Said
from fastdecode.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from fastdecode.engine.llm import LLM


_MAY_PASS: Final = (PREVIOUS_FAILED, CHILD_DIED)
"""Codes of errors that another run of the same line may not have."""
KEEP_ALL = ConversationLimits(most=1 << 62)


@dataclass(frozen=True)
class JobResult:
    """How a job stands."""

    num_lines: int
    num_done: int
    """Answered, now or in a run before."""
    num_failed: int
    """Of those, with an error."""
    num_bad: int = 0
    """Of those, lines that fail in every run: bad ones, and prompts that are too long."""
    num_run: int = 0
    """Answered now."""
    num_run_failed: int = 0
    first_error: str | None = None
    """That of the first line, in the input's order, that failed now; None: none did."""
    lost: FastDecodeError | None = None
    """The failure of workers because of which lines are left."""
    interrupted: bool = False


@dataclass(frozen=True)
class AnswerRules:
    """What a job's answers depend on beside its lines."""

    seed_of: Callable[[LineId, int], int]
    """The seed of a prompt of a line that doesn't say one."""
    template: ChatTemplate | None
    """For lines that are conversations."""
    date: datetime
    """What templates are told."""
    answers_lost: bool = False
    """Lines that workers were lost with are answered with that error, not left for another run."""


class Output(Protocol):
    """Where answers go."""

    def begin(self) -> None: ...
    def append(self, place: int, prompt: str | None, answer: dict[str, Any]) -> None: ...
    def sync_if_due(self) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class _OpenLine:
    """A line whose prompts run."""

    place: int
    """Among the lines that are answered now."""
    request: LineRequest
    num_prompts: int
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """By the prompt's place in the line."""


class BatchJob:
    """A job that holds its output. ``run`` it, and close it; made by ``opening``."""

    def __init__(
        self,
        source: LineSource,
        lines: LineFormat,
        rules: AnswerRules,
        found: Survey,
        output: Output,
        recovered: Recovered,
        turns: ConversationStore | None = None,
        session: JobSession | None = None,
    ) -> None:
        self.session = session
        """What R-workers keep its caches by, if they outlive it."""
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
        self._num_failed = recovered.num_failed
        self._num_run = self._num_run_failed = self._num_taken = 0
        self._ended = EndedAnswers()
        """Answers to prompts that are done."""
        self._num_hopeless = 0
        """Failed lines that the survey let pass, and that no other run can answer."""
        self._first_failed: tuple[int, str] | None = None
        self._open: dict[int, _OpenLine] = {}
        self._lost: FastDecodeError | None = None
        self._interrupted = False
        self._input_changed = False

    def __enter__(self) -> BatchJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rules.template is not None:
            self._rules.template.close()
        # If something went wrong already, that is what to tell.
        with contextlib.suppress(*([FastDecodeError] if error is not None else [])):
            if self._turns is not None:
                self._turns.close()
            self._output.close()
        self._source.close()
        if self.session is not None:
            # Whoever was told goodbye keeps nothing for it.
            self.session.close(is_over=error is None and self._lost is None)

    @property
    def num_pending(self) -> int:
        """Lines that aren't answered yet."""
        return self._survey.num_lines - len(self._done)

    def result(self) -> JobResult:
        """How it stands now."""
        return JobResult(
            num_lines=self._survey.num_lines, num_done=len(self._done), num_failed=self._num_failed,
            num_bad=min(self._num_failed, len(self._survey.bad) + self._num_hopeless),
            num_run=self._num_run, num_run_failed=self._num_run_failed,
            first_error=None if self._first_failed is None else self._first_failed[1],
            lost=self._lost, interrupted=self._interrupted,
        )  # fmt: skip

    def run(self, llm: LLM, stopping: Stopping, progress: Progress) -> JobResult:
        """Answer what is left, until it is done, or ``stopping`` is asked, or
        no R-worker is left.

        Raises:
            ConfigError: the input was changed meanwhile; some answers may be to
                lines that aren't there any more.
            FastDecodeError: (code ``output_failed``) the output can't be
                written.
        """
        progress.begin(self._survey.num_lines, len(self._done), self._survey.limits)
        self._output.begin()
        tokens_before = llm.stats.num_output_tokens
        prompts_before = llm.stats.num_prompt_tokens
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
                done=len(self._done), num_failed=self._num_failed,
                num_tokens=llm.stats.num_output_tokens - tokens_before, workers=now.workers,
                num_prompt_tokens=llm.stats.num_prompt_tokens - prompts_before,
                num_running=now.num_running, running=llm.running_answers(), ended=self._ended,
            )  # fmt: skip

        with contextlib.suppress(StopNow):
            asked = self._requests(llm, stopping)
            for output in llm.stream(asked, on_tick, self._conversations):
                self._collect(output, llm)
        self._output.sync()
        self._interrupted = stopping.wanted and self.num_pending > 0
        if self._input_changed:
            raise ConfigError(
                f"{self._source} was changed while it was read: some answers may be to lines that "
                "are gone"
            )
        return self.result()

    def _requests(self, llm: LLM, stopping: Stopping) -> Iterator[PromptRequest | Turn]:
        """The prompts of the lines that are left; bad lines are answered here."""
        with self._source.open() as file:
            reader = LineReader(file)
            for number, raw in reader:
                if number not in self._survey.shard:
                    continue
                if number in self._done:
                    self._note_done_turn(number, raw)
                    continue
                place, self._num_taken = self._num_taken, self._num_taken + 1
                request, prompts = self._read(number, place, raw, llm)
                if request is not None:
                    self._open[number] = _OpenLine(place, request, len(prompts))
                    for i, prompt in enumerate(prompts):
                        if stopping.wanted:
                            return
                        yield self._asked(number, i, prompt, request)
                if stopping.wanted:
                    return
            self._input_changed = reader.sha256 != self._survey.sha256

    def _read(
        self, number: int, place: int, raw: bytes | None, llm: LLM
    ) -> tuple[LineRequest | None, list[Prompt | Prompter]]:
        """A line's request and its prompts; None if it was answered with an
        error. A turn's prompt is made when the turns before it are over."""
        line_id: LineId | None = None
        whose: str | None = None
        try:
            if raw is None:
                raise too_long(number)
            request = self._lines.parse(raw, number)
            line_id, whose = request.line_id, request.conversation_id
            if number in self._survey.duplicates:
                text = (
                    f"an earlier line has this {self._lines.id_field}: give each line one of its "
                    "own"
                )
                raise LineError(text, code=self._lines.duplicate_code, param=self._lines.id_field)
            if request.conversation_id is not None:
                return request, [self._prompter(request, llm)]
            return request, [self._prompt(turn, llm) for turn in request.prompts]
        except RequestError as error:
            if isinstance(error, LineError):
                line_id = line_id if error.line_id is None else error.line_id
                whose = whose or error.conversation_id
            if whose is not None:
                self._failed_conversations.add(whose)
            self._refuse(number, place, None, line_id, error)
            return None, []

    def _note_done_turn(self, number: int, raw: bytes | None) -> None:
        """A line was answered by an earlier run. If it is a turn that failed,
        those after it do, too."""
        if self._turns is None or raw is None or str(number) in self._turns.names:
            return
        try:
            whose = self._lines.parse(raw, number).conversation_id
        except LineError as error:
            whose = error.conversation_id
        if whose is not None:
            self._failed_conversations.add(whose)

    def _prompter(self, request: LineRequest, llm: LLM) -> Prompter:
        if request.conversation_id in self._failed_conversations:
            return _refuse_later_turn
        (said,) = request.prompts
        if not isinstance(said, Chat):
            return PromptTurn(said, llm.codec)
        assert self._rules.template is not None, "the reader refuses chats without a template"
        return ChatTurn(tuple(said.messages), llm.codec, self._rules.template, said.how)

    def _asked(
        self, number: int, place: int, prompt: Prompt | Prompter, request: LineRequest
    ) -> PromptRequest | Turn:
        """A line's prompt at this place, as a request."""
        name, params = f"{number}.{place}", self._params(request, place)
        if request.conversation_id is not None:
            assert callable(prompt)
            return Turn(name, request.conversation_id, prompt, params, request.cache, str(number))
        assert not callable(prompt)
        return PromptRequest(name, prompt, params, request.cache)

    def _prompt(self, turn: Said, llm: LLM) -> Prompt:
        if not isinstance(turn, Chat):
            return turn
        assert self._rules.template is not None, "the reader refuses chats without a template"
        text = self._rules.template.render(turn.messages, self._rules.date, turn.how)
        return llm.codec.encode(text, add_special_tokens=False)

    def _params(self, request: LineRequest, place: int) -> SamplingParams:
        if request.params.seed is not None:
            return request.params
        return replace(request.params, seed=self._rules.seed_of(request.line_id, place))

    def _collect(self, output: RequestOutput, llm: LLM) -> None:
        """One prompt is done. Its line is answered once all of its prompts are,
        or one has failed."""
        number, place = map(int, output.request_id.split("."))
        line = self._open.get(number)
        if line is None:
            return  # another prompt of the line has failed
        if output.error is None:
            line.outputs[place] = output
            self._ended.add_output(output)
            if len(line.outputs) == line.num_prompts:
                del self._open[number]
                outputs = [line.outputs[i] for i in range(line.num_prompts)]
                answer = self._lines.answer(number, line.request, outputs, llm.codec)
                self._write(number, line.place, output.prompt, answer, failed=False)
            return
        del self._open[number]
        is_lost = not isinstance(output.error, (RequestError, CapacityError))
        if is_lost:
            self._lost = output.error
        if not is_lost or self._rules.answers_lost:
            self._refuse(number, line.place, output.prompt, line.request.line_id, output.error)
        # Else it isn't the line's fault: it stays as it was, to be answered
        # when the job is resumed.

    def _refuse(
        self,
        number: int,
        place: int,
        prompt: str | None,
        line_id: LineId | None,
        error: FastDecodeError,
    ) -> None:
        """Answer a line with its error."""
        if self._first_failed is None or number < self._first_failed[0]:
            named = "" if line_id is None else f" ({line_id!r})"
            self._first_failed = number, f"line {number}{named}: {error.code}: {error}"
        is_hopeless = isinstance(error, RequestError) and error.code not in _MAY_PASS
        self._num_hopeless += is_hopeless and number not in self._survey.bad
        self._write(number, place, prompt, self._lines.refusal(number, line_id, error), failed=True)

    def _write(
        self, number: int, place: int, prompt: str | None, answer: dict[str, Any], *, failed: bool
    ) -> None:
        self._done.add(number)
        self._num_failed += failed
        self._num_run += 1
        self._num_run_failed += failed
        self._output.append(place, prompt, answer)


def _refuse_later_turn(history: History) -> TurnPrompt:
    """The prompt of a turn that comes after one that has failed."""
    raise after_a_failed_turn()
