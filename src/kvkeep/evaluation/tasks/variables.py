"""Variable tracking: a value that is handed on from variable to variable."""

from __future__ import annotations

import random
import string
from itertools import pairwise

from kvkeep.evaluation.examples import Turn
from kvkeep.evaluation.tasks.base import Draft, Parts, Task
from kvkeep.haystack import filled, filler, spread_depths

_LETTERS = 5


def variable_tracking(hops: int) -> Task:
    """One chain of `hops` assignments after the first."""

    def make(draft: Draft) -> Parts:
        text = filler()
        draw = random.Random(f"kvkeep variables {draft.seed}")
        value = str(draw.randrange(10_000, 100_000))
        names: list[str] = []
        while len(names) <= hops:
            name = "".join(draw.choices(string.ascii_uppercase, k=_LETTERS))
            if name not in names:
                names.append(name)
        depths = sorted(spread_depths(len(names), draft.seed))  # apart: the chain keeps its order
        said = [f"VAR {names[0]} = {value}."]
        said += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
        document, hidden = filled(
            draft.count_tokens,
            draft.n_tokens,
            text,
            list(zip(said, depths, strict=True)),
            seed=draft.seed,
            avoid=[value, *names],
        )
        turn = Turn(
            question=f"Find all variables that have the value {value} in the text above.",
            answers=tuple(names),
            answer_prefix=f"These variables have the value {value}: VAR",
            gold=f" {', VAR '.join(names[:-1])} and VAR {names[-1]}.",
        )
        details = {"hops": hops, "depth": round(hidden[0].depth, 4), "haystack": text.name}
        return Parts(document, (turn,), details=details)

    return Task(
        name="variable-tracking",
        version=1,
        summary=f"all variables of a chain of {hops} hops, hidden in filler",
        source="RULER (arXiv:2404.06654), section 3.2",
        scoring="fraction",
        max_tokens=40,
        make=make,
    )
