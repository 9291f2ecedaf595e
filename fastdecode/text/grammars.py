"""Structured outputs as grammars of the package llguidance, which is an extra.

JSON schemas are Draft 2020-12, as far as llguidance knows the keywords: one that
it doesn't know is refused, not ignored. Regular expressions are those of Rust's
regex package, without look-around. Grammars are Lark's or GBNF's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Final

from fastdecode.core.errors import RequestError
from fastdecode.core.install import pip_command
from fastdecode.core.structured import StructuredOutputs, refuse
from fastdecode.text.call_rules import TOOL_MARK, refuse_tool
from fastdecode.text.harmony import final_head, thoughts_rule
from fastdecode.text.lark import WHITESPACE, exact_rule, marked, quoted, text_until
from fastdecode.text.reasoning import REASONING_FORMATS
from fastdecode.text.schemas import followable

NO_TOKENIZER: Final = (
    "structured outputs need text, but the model directory has no tokenizer.json: add the "
    "model's tokenizer.json"
)
_SHOWN: Final = 500
"""Characters of llguidance's message that an error repeats."""


def llguidance() -> ModuleType:
    """Return the package. Raises RequestError: If it isn't installed."""
    try:
        import llguidance
    except ModuleNotFoundError:
        raise RequestError(
            "structured outputs need the package 'llguidance', which is not installed here. "
            f"Install it with: {pip_command('structured')}",
            code="missing_extra",
        ) from None
    module: ModuleType = llguidance
    return module


def check_structured(wanted: StructuredOutputs, special: Mapping[str, int]) -> None:
    """Check structured outputs.

    Raises:
        RequestError: If the schema, expression or grammar can't be followed (code
            ``invalid_structured_outputs``), or the package is missing (``missing_extra``).
    """
    package = llguidance()
    limits = package.LLParserLimits(verbose_errors=False)
    check = partial(package.LLMatcher.validate_grammar, limits=limits)
    said = check(grammar_of(wanted, special))
    if said and not said.startswith("WARNING"):
        _refuse_tool(wanted.grammar or "", check)
        raise refuse(f".{wanted.kind} can't be followed: {_brief(said)}")


def _refuse_tool(grammar: str, check: Callable[[str], str]) -> None:
    """Raises RequestError: If the rules of one tool of ``grammar`` can't be followed."""
    for section in grammar.split(f"\n{TOOL_MARK}")[1:]:
        name, _, rules = section.partition("\n")
        said = check(f"start: {rules.partition(':')[0]}\n{rules}")
        if said and not said.startswith("WARNING"):
            why = said.partition("\n   1 | ")[0]  # then it quotes our grammar
            raise refuse_tool(name, _brief(why.rpartition("JSON schema: ")[2]))


def grammar_of(wanted: StructuredOutputs, special: Mapping[str, int]) -> str:
    """Return the grammar as llguidance takes it. ``special``: ids of the model's special tokens,
    by name. Raises RequestError: See ``check_structured``."""
    grammar = _grammar_of_answer(wanted)
    if wanted.reasoning is None:
        return grammar
    return _after_reasoning(wanted, grammar, special)


def _grammar_of_answer(wanted: StructuredOutputs) -> str:
    package = llguidance()
    if wanted.regex is not None:
        return str(package.LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        return f"start: {' | '.join(map(quoted, wanted.choice))}"
    try:
        if wanted.grammar is not None:
            return str(package.grammar_from("grammar", wanted.grammar))
        schema = wanted.schema
        assert schema is not None, "one of the kinds is given"
        exact = exact_rule(schema)
        if exact is not None:
            return f"start: {exact}"
        options: dict[str, Any] = {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}
        if wanted.disable_any_whitespace:
            options = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        said = json.dumps(followable(schema))
        return str(package.LLMatcher.grammar_from_json_schema(said, defaults=options))
    except (ValueError, RecursionError) as error:
        what = "read" if wanted.grammar is not None else "followed"
        raise refuse(f".{wanted.kind} can't be {what}: {_brief(str(error))}") from None


def _after_reasoning(wanted: StructuredOutputs, grammar: str, special: Mapping[str, int]) -> str:
    """Return a grammar with the reasoning, any text, before it."""
    family = REASONING_FORMATS.get(wanted.reasoning or "")
    if family is None:
        known = ", ".join(REASONING_FORMATS)
        raise refuse(f".reasoning {wanted.reasoning!r:.80} is none of {known}")
    if family.has_channels:
        is_inside = wanted.in_reasoning
        start = f"start: thoughts{'' if is_inside else '?'} {final_head(special)} @answer"
        outer = f"{start}\n{thoughts_rule(special, is_inside=is_inside)}"
        return _around(grammar, outer)
    begin = marked(family.begin, special)
    if wanted.in_reasoning or (family.end in special and family.begin not in special):
        begin = ""
    either = "" if wanted.in_reasoning else " | @answer"
    thoughts = text_until("thoughts", family.end, special)
    return _around(grammar, f"start: {begin} thoughts /\\n*/ @answer{either}\n{thoughts}")


def _around(grammar: str, outer: str) -> str:
    """Return a Lark grammar whose rule ``@answer`` is another grammar."""
    # llguidance writes Lark's grammars as they are, others as JSON.
    grammars = (
        json.loads(grammar)
        if grammar.lstrip().startswith("{")
        else {"grammars": [{"lark_grammar": grammar}]}
    )
    grammars["grammars"][0]["name"] = "answer"
    return json.dumps({**grammars, "grammars": [{"lark_grammar": outer}, *grammars["grammars"]]})


def _brief(said: str) -> str:
    text = " ".join(said.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
