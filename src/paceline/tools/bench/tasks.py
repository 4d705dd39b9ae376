"""Six tasks of twenty prompts each for comparing drafters: they differ in how much can be copied or predicted.

code: functions to complete. chat: open requests. maths: word problems. summary: a short report to shorten. translation:
    sentences, to and from four languages. questions: facts, in a sentence or two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from paceline.tools.bench.prompts import texts

Task = Literal["code", "chat", "maths", "summary", "translation", "questions"]
TASKS: tuple[Task, ...] = get_args(Task)

PROMPTS: Mapping[Task, tuple[str, ...]] = {task: texts("tasks", task) for task in TASKS}
"""What a user says; models with a chat template are asked it as a chat."""
