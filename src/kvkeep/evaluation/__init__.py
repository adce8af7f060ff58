"""Evaluation: what eviction costs, by tasks in the manner of RULER and against the exact cache."""

from kvkeep.evaluation.asking import (
    Asked,
    Questions,
    listed,
    parse_length,
    prose_digest,
    split_names,
)
from kvkeep.evaluation.examples import Example, Turn
from kvkeep.evaluation.export import export_examples
from kvkeep.evaluation.fidelity import TextPlan, read_text, run_text
from kvkeep.evaluation.harness import evicting_lm, require_lm_eval, run_harness
from kvkeep.evaluation.reading import Reading, evicted, read
from kvkeep.evaluation.records import (
    FidelityRecord,
    HarnessRecord,
    Header,
    Record,
    TaskRecord,
    header_of,
)
from kvkeep.evaluation.rendering import Rendered, Tokens, fitted, render, tokenize
from kvkeep.evaluation.results import Results, ResultsFile, read_results
from kvkeep.evaluation.running import Plan, run_tasks
from kvkeep.evaluation.scoring import RULES, score
from kvkeep.evaluation.settings import (
    FULL,
    NONE,
    PROTOCOLS,
    Setting,
    Variant,
    setting_of,
    variants_of,
)
from kvkeep.evaluation.summaries import (
    ALL_TASKS,
    FidelitySummary,
    Interval,
    Summary,
    TaskSummary,
    summarise,
)
from kvkeep.evaluation.tasks import TASKS, Task, example_of, task_of

__all__ = [
    "ALL_TASKS",
    "FULL",
    "NONE",
    "PROTOCOLS",
    "RULES",
    "TASKS",
    "Asked",
    "Example",
    "FidelityRecord",
    "FidelitySummary",
    "HarnessRecord",
    "Header",
    "Interval",
    "Plan",
    "Questions",
    "Reading",
    "Record",
    "Rendered",
    "Results",
    "ResultsFile",
    "Setting",
    "Summary",
    "Task",
    "TaskRecord",
    "TaskSummary",
    "TextPlan",
    "Tokens",
    "Turn",
    "Variant",
    "evicted",
    "evicting_lm",
    "example_of",
    "export_examples",
    "fitted",
    "header_of",
    "listed",
    "parse_length",
    "prose_digest",
    "read",
    "read_results",
    "read_text",
    "render",
    "require_lm_eval",
    "run_harness",
    "run_tasks",
    "run_text",
    "score",
    "setting_of",
    "split_names",
    "summarise",
    "task_of",
    "tokenize",
    "variants_of",
]
