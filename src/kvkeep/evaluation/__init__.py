"""Evaluation: what eviction costs, by tasks in the manner of RULER and against the exact cache."""

from kvkeep.evaluation.asking import Questions, parse_length, split_names
from kvkeep.evaluation.examples import Example, Turn
from kvkeep.evaluation.export import export_examples
from kvkeep.evaluation.rendering import Rendered, Tokens, fitted, render, tokenize
from kvkeep.evaluation.scoring import RULES, score
from kvkeep.evaluation.tasks import TASKS, Task, example_of, task_of

__all__ = [
    "RULES",
    "TASKS",
    "Example",
    "Questions",
    "Rendered",
    "Task",
    "Tokens",
    "Turn",
    "example_of",
    "export_examples",
    "fitted",
    "parse_length",
    "render",
    "score",
    "split_names",
    "task_of",
    "tokenize",
]
