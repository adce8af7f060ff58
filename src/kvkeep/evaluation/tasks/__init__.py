"""Tasks: seeded prompts with known answers, in the manner of RULER."""

from kvkeep.evaluation.tasks.base import Draft, Parts, Task
from kvkeep.evaluation.tasks.registry import TASKS, example_of, task_of

__all__ = ["TASKS", "Draft", "Parts", "Task", "example_of", "task_of"]
