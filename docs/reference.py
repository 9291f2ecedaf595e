"""Write the reference pages, and the types of LLM's options, from the declarations in the code.

python docs/reference.py            # write docs/reference/*.md
python docs/reference.py --check    # exit code 1 if one of them is not what it should be
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastdecode.conversations.conversations import Keeping
from fastdecode.core import errors
from fastdecode.core.config.engine import GROUPS
from fastdecode.core.config.features import (
    CONTRADICTIONS,
    FEATURES,
    NOT_YET,
    TRIPLES,
    refused_pairs,
)
from fastdecode.core.config.options import Declared, declared
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.model.families import ROWS
from fastdecode.core.model.refused import REFUSED
from fastdecode.core.model.rows import Row
from fastdecode.core.vllm_names import OPTION_NAMES
from fastdecode.engine.instances.client import status_to_json
from fastdecode.engine.stats import EngineFigures, EngineStats, HolderFigures
from fastdecode.server.link import StatusReport
from fastdecode.server.metrics import Metrics
from fastdecode.wire.codec import KINDS
from fastdecode.wire.messages import PROTOCOL_VERSION

PAGES = Path(__file__).resolve().parent / "reference"
README = PAGES.parents[1] / "README.md"
_TABLE = re.compile(r"(?<=## Models\n\n)(\|.*?)(?=\n\n)", re.DOTALL)
MADE = "<!-- Made by `python docs/reference.py`. Do not edit. -->"
_FIGURES = status_to_json(
    EngineStats(), EngineFigures(1, (HolderFigures("r0", None, 1, 0, 0, 0.0),))
)
"""Of an engine that has made a step: the page names every metric."""
_GROUPS_OF_LLM = (*GROUPS.values(), Keeping)
TITLES = {
    "s_part": "S-part",
    "r_part": "R-part",
    "batching": "Batching",
    "cache": "Prefix cache",
    "cluster": "Cluster",
    "instances": "Instances",
}


def options_page() -> Iterator[str]:
    """Every option of an engine, by group."""
    yield from (
        "# Engine options",
        "",
        MADE,
        "",
        "`generate`, `run-batch`, `serve` and `instance` take these options. In Python they are",
        "keyword arguments of `LLM(model, ...)` with the names in the second column.",
    )
    for name, group in GROUPS.items():
        yield from ("", f"## {TITLES[name]}", "")
        yield from ("| option | in Python | default | |", "|---|---|---|---|")
        for each in declared(group):
            cells = f"`{each.flag}`", f"`{each.name}`", _default(each), _cell(each.option.help)
            yield f"| {' | '.join(cells)} |"


OPTIONS_FILE = PAGES.parents[1] / "fastdecode" / "engine" / "llm_options.py"
_ALIAS_KINDS = {"prefix_cache": "bool", "cuda_graphs": "bool"}
"""Where vLLM's option is of another type than the one here."""


def options_type() -> Iterator[str]:
    """The types of ``LLM``'s options, for type checkers and editors."""
    yield from (
        '"""The options of ``LLM``, for type checkers and editors. Made by ``python',
        'docs/reference.py`` from the declarations of the options. Do not edit."""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Sequence",
        "from typing import TYPE_CHECKING, TypedDict",
        "",
        "if TYPE_CHECKING:",
        "    import torch",
        "",
        "",
        "class LLMOptions(TypedDict, total=False):",
        '    """Each is as ``docs/reference/options.md`` says."""',
        "",
    )
    kinds = {each.name: _type_of(each) for group in _GROUPS_OF_LLM for each in declared(group)}
    for name, kind in kinds.items():
        yield f"    {name}: {kind}"
    for alias, name in OPTION_NAMES.items():
        yield f"    {alias}: {_ALIAS_KINDS.get(name, kinds[name])}"
        yield f'    """The name of ``{name}`` in vLLM."""'


def _type_of(each: Declared) -> str:
    kind = "Sequence[str]" if each.kind is tuple else each.kind.__name__
    if each.kind is int and each.option.choices:
        kind = "int | str"
    if each.name == "dtype":
        kind = f"{kind} | torch.dtype"
    return f"{kind} | None" if each.default is None else kind


def _default(each: Declared) -> str:
    if each.default is None or each.default == ():
        return "–"
    return f"`{str(each.default).lower() if isinstance(each.default, bool) else each.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def features_page() -> Iterator[str]:
    """The matrix of features, and a reason for each refused pair."""
    num_pairs = len(FEATURES) * (len(FEATURES) - 1) // 2
    num_accepted = num_pairs - len(NOT_YET) - len(CONTRADICTIONS)
    yield from (
        "# Which features work together",
        "",
        MADE,
        "",
        f"{len(FEATURES)} features make {num_pairs} pairs:",
        f"{num_accepted} are accepted, {len(NOT_YET)} are not built yet, and",
        f"{len(CONTRADICTIONS)} contradict each other.",
        "`fastdecode doctor --features` prints the same. An engine refuses them at its start,",
        "before anything is loaded.",
        "",
        "✓ accepted · – not built yet · ✗ contradiction; columns have the rows' numbers",
        "",
    )
    numbers = [str(number + 1) for number in range(len(FEATURES))]
    yield f"| | | {' | '.join(numbers)} |"
    yield f"|---|---|{'---|' * len(FEATURES)}"
    for number, one in zip(numbers, FEATURES, strict=True):
        cells = ("" if one == other else _mark(one, other) for other in FEATURES)
        yield f"| {number} | {one} | {' | '.join(cells)} |"
    for title, refused in (("Not built yet", NOT_YET), ("Contradictions", CONTRADICTIONS)):
        yield from ("", f"## {title}", "", "| features | why |", "|---|---|")
        by_reason: dict[str, list[str]] = {}
        for one, other, reason in refused_pairs(refused):
            by_reason.setdefault(reason, []).append(f"{one} with {other}")
        yield from (f"| {'; '.join(pairs)} | {why} |" for why, pairs in by_reason.items())
    yield from ("", "## Not all three yet", "", "| features | why |", "|---|---|")
    yield from (f"| {', '.join(names)} | {reason} |" for names, reason in TRIPLES)


def _mark(one: str, other: str) -> str:
    pair = frozenset((one, other))
    return "✗" if pair in CONTRADICTIONS else "–" if pair in NOT_YET else "✓"


EXITS = {
    0: "every request was answered",
    1: "an unexpected failure; or the answers are complete, and the summary could not be written",
    2: "an option, a file or the model directory is wrong; nothing was done",
    3: "some requests failed; the others are done",
    4: "all R-workers were lost, one hung and the launcher ended the job, or the launcher failed",
    5: "a server's HTTP process ended",
    130: "interrupted; `run-batch --resume` continues",
}


def exit_codes_page() -> Iterator[str]:
    """What a command's exit code means, and the classes of errors behind it."""
    yield from (
        "# Exit codes",
        "",
        MADE,
        "",
        "All commands use them. 1 also answers no: no plan of `size` or `plan` holds, `bench` is "
        "beyond its tolerance, `doctor` has a FAIL, `cache` found damage.",
        "",
    )
    yield from ("| code | meaning | errors |", "|---|---|---|")
    for code, meaning in EXITS.items():
        names = [f"`{kind.__name__}`" for kind in _errors() if kind.exit_code == code]
        yield f"| {code} | {meaning} | {', '.join(names)} |"
    yield from ("", "## Error codes", "")
    yield "JSON answers name an error by a code that stays the same across releases. Each class has"
    yield from ("a usual one; many errors have a more specific one.", "", "| class | code |")
    yield "|---|---|"
    for kind in _errors():
        yield f"| `{kind.__name__}` | `{kind.default_code}` |"


def _errors() -> list[type[FastDecodeError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, FastDecodeError)]


def metrics_page() -> Iterator[str]:
    """What ``/metrics`` has."""
    yield from ("# Metrics", "", MADE, "", "A server gives them at `/metrics`, in Prometheus's")
    yield from (
        "format. Where a number means what vLLM's means, it has vLLM's name and buckets.",
        "",
    )
    yield from ("| name | kind | |", "|---|---|---|")
    seen = StatusReport(state="open", num_r_workers=1, num_live_r_workers=1, figures=_FIGURES)
    metrics = Metrics(4096)
    metrics.see(0.0, seen)
    for family in metrics.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"| `{name}` | {family.type} | {family.documentation} |"


def messages_page() -> Iterator[str]:
    """Every message of the protocol."""
    yield from ("# Messages on the wire", "", MADE, "")
    yield f"Protocol version {PROTOCOL_VERSION}, described in `fastdecode/wire/messages.py`."
    yield from ("", "| number | message | module | said by |", "|---|---|---|---|")
    for number, kind in sorted(KINDS.items()):
        speakers = getattr(kind, "said_by", None)
        said_by = ", ".join(sorted(each.value for each in speakers)) if speakers else ""
        yield f"| {number} | `{kind.__name__}` | `{kind.__module__}` | {said_by} |"


def models_page() -> Iterator[str]:
    """Families that run, and architectures that are refused with the reason."""
    yield from (
        "# Model families",
        "",
        MADE,
        "",
        f"{len(ROWS)} families, each a row of `fastdecode/core/model/families.py`. How they are",
        "tested, and how to add one: [models](../guides/models.md).",
        "",
        "## Supported",
        "",
        "| models | `architectures` of config.json | experts |",
        "|---|---|---|",
    )
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.architectures if not name.endswith("Model"))
        yield f"| {row.models} | {names} | {'✓' if 'moe' in row.fields else ''} |"
    yield from (
        "",
        "## Refused by name",
        "",
        "Other architectures are refused, too, without a reason of their own.",
        "",
        "| models | why |",
        "|---|---|",
    )
    for refused in REFUSED:
        yield f"| {refused.models} | {refused.what} |"


PAGES_BY_NAME = {
    "options.md": options_page,
    "features.md": features_page,
    "exit_codes.md": exit_codes_page,
    "metrics.md": metrics_page,
    "messages.md": messages_page,
    "models.md": models_page,
}


def readme_models() -> str:
    """README's table of models: the first word of each row's."""
    kinds: dict[str, dict[str, None]] = {}
    for row in ROWS:
        name = re.match(r"[A-Za-z.-]*[A-Za-z]", row.models)
        kinds.setdefault(_kind_of(row), {})[name[0] if name else row.models] = None
    lines = [f"| {kind} | {', '.join(names)} |" for kind, names in kinds.items()]
    return "\n".join(lines)


def _kind_of(row: Row) -> str:
    if "moe" in row.fields:
        return "mixtures of experts"
    return "dense, LayerNorm" if row.fields.get("norm") == "layer" else "dense, RMSNorm"


def pages() -> dict[Path, str]:
    """What every page should be, by its path; README, where its table of models
    isn't the rows', with the right one."""
    made = {PAGES / name: "\n".join(make()) + "\n" for name, make in PAGES_BY_NAME.items()}
    before, table, after = _TABLE.split(README.read_text("utf-8"))
    made[OPTIONS_FILE] = "\n".join(options_type()) + "\n"
    return {**made, README: f"{before}{table.splitlines()[0]}\n|---|---|\n{readme_models()}{after}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not _is(path, text)]
    for path in stale:
        print(f"{'stale' if is_check else 'written'}: {path.relative_to(PAGES.parents[1])}")
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(pages()[path], "utf-8")
    return 1 if is_check and stale else 0


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
