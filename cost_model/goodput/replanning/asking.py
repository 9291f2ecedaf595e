"""A question about roles, and its answer, as JSON: simulations are run by a
process of their own, at the lowest priority.

    python -m cost_model.goodput.replanning < question.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from cost_model.goodput.replanning.measured import LinearTimes
from cost_model.goodput.replanning.roles import Alike, Comes, Judge, JudgedRoles, Roles
from cost_model.goodput.slo import Slo

_NICEST = 19


@dataclass(frozen=True)
class RoleQuestion:
    alike: Alike
    comes: Comes
    slo: Slo
    present: Roles

    def answer(self) -> JudgedRoles:
        return Judge(self.alike, self.comes, self.slo).judge(self.present)


def question_to_json(question: RoleQuestion) -> str:
    return json.dumps(asdict(question))


def question_from_json(text: str) -> RoleQuestion:
    """Raises ValueError, KeyError or TypeError: it is none."""
    said = json.loads(text)
    alike = {**said["alike"], "times": LinearTimes(**said["alike"]["times"])}
    lengths = tuple((int(prompt), int(output)) for prompt, output in said["comes"]["lengths"])
    comes = {**said["comes"], "lengths": lengths}
    return RoleQuestion(
        Alike(**alike), Comes(**comes), Slo(**said["slo"]), Roles(**said["present"])
    )


def judged_to_json(judged: JudgedRoles) -> str:
    return json.dumps(asdict(judged))


def judged_from_json(text: str) -> JudgedRoles:
    """Raises ValueError, KeyError or TypeError: it is none."""
    said: Mapping[str, Any] = json.loads(text)
    roles = {name: Roles(**said[name]) for name in ("present", "best")}
    return JudgedRoles(**{**said, **roles})


def main(asked: TextIO = sys.stdin, told: TextIO = sys.stdout) -> None:
    os.nice(_NICEST)
    print(judged_to_json(question_from_json(asked.read()).answer()), file=told, flush=True)
