"""Kvkeep's side: the prompts for all, and times. Its answers come from `kvkeep eval`.

python kvkeep_side.py timings --prompts FILE --model FOLDER --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kvkeep  # a fast BLAS only counts if it comes before mlx

# isort: split
import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from peer_answers import (
    Prompt,
    Timing,
    read_prompts,
    rows_key,
    weights_digest,
    write_rows,
    write_timings,
)
from peer_plan import BUDGETS, FULL, OWN, PAIRS, ROWS_PROMPTS

from kvkeep.bench import Device, stock_prefill
from kvkeep.caches import row_groups
from kvkeep.compaction import prefill_and_compact
from kvkeep.evaluation import evicted, read, variants_of
from kvkeep.generation import draft_start, repeat_prompt

_STEPS = 24


def prompts_of(export: Path, tokenizer: Any) -> Iterator[Prompt]:
    """An export's prompts with their token ids, as all sides are to read them.

    Raises:
        ValueError: the ids are not as many as the export says, or a prompt has several turns.
    """
    _, *lines = export.read_text(encoding="utf-8").splitlines()
    for line in map(json.loads, lines):
        (turn,) = line["turns"]
        text = line["context_text"] + turn["ask_text"]
        ids = tokenizer.encode(text, add_special_tokens=not line["templated"])
        if len(ids) != line["tokens"]:
            raise ValueError(f"{line['task']} {line['index']}: {len(ids)} tokens")
        yield Prompt(
            line["task"],
            line["index"],
            text,
            tuple(ids),
            line["max_tokens"],
            tuple(turn["answers"]),
            line["scoring"],
        )


def rows(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, np.ndarray]:
    """Which rows each pair's setting keeps: bool [L, H_kv, T] by prompt, setting and budget."""
    found = {}
    for prompt in prompts:
        for pair in PAIRS:
            variants = variants_of([pair.ours], BUDGETS)[1:]
            configs = [variant.config for variant in variants if variant.config is not None]
            with mx.stream(generation_stream):
                repeat = repeat_prompt(tokenizer, configs[0])
                reading = read(model, prompt.ids[:-1], configs, repeat=repeat)
                for budget, config in zip(BUDGETS, configs, strict=True):
                    cache = evicted(reading, config).cache
                    kept = np.stack([_kept(layer, reading.length) for layer in cache])
                    found[rows_key(prompt, pair.name, budget)] = kept
            mx.clear_cache()
    return found


def _kept(layer: Any, length: int) -> np.ndarray:
    """Bool [H_kv, T]: the rows that a layer holds."""
    groups = row_groups(layer)
    kept = np.zeros((groups[0].layer_heads, length), np.bool_)
    for group in groups:
        kept[group.heads[:, None], group.positions] = True
    return kept


def timings(
    model: Any, tokenizer: Any, prompt: Prompt, wanted: list[tuple[str, str]], rounds: int
) -> list[Timing]:
    """Prefill with eviction and decode steps after it, one value per round, interleaved."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in wanted}
    for number in range(-1, rounds):  # the first round warms up
        for key in wanted[:1] if number < 0 else wanted:
            start = time.perf_counter()
            cache = _prefilled(model, tokenizer, list(prompt.ids), *key)
            prefill = time.perf_counter() - start
            step = _decode_step(model, cache, prompt.ids[-1])
            if number >= 0:
                found[key].append((prefill, step))
            del cache
            mx.clear_cache()
    return [
        Timing(*key, tuple(p for p, _ in values), tuple(s for _, s in values))
        for key, values in found.items()
    ]


def _prefilled(model: Any, tokenizer: Any, ids: list[int], setting: str, budget: str) -> list[Any]:
    tokens, last = ids[:-1], ids[-1]
    if setting == FULL:
        return stock_prefill(model, tokens, 2048)
    planned = next(p for p in (*PAIRS, *OWN) if p.name == setting)
    config = variants_of([planned.ours], [budget])[-1].config
    assert config is not None
    with mx.stream(generation_stream):
        done = prefill_and_compact(
            model,
            tokens,
            make_prompt_cache(model),
            config,
            step=2048,
            repeat_prompt=repeat_prompt(tokenizer, config),
            draft_start=draft_start(tokenizer, config, last),
        )
        mx.eval([layer.state for layer in done.cache])
    return done.cache


def _decode_step(model: Any, cache: list[Any], token: int) -> float:
    """Seconds of a step of mlx-lm's own loop, without an end."""
    start = time.perf_counter()
    for _ in generate_step(mx.array([token]), model, prompt_cache=cache, max_tokens=_STEPS):
        pass
    return (time.perf_counter() - start) / _STEPS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rows", "timings"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wanted", nargs="*", default=[], help="SETTING=BUDGET to time")
    options = parser.parse_args()
    model, tokenizer = mlx_lm.load(str(options.model))[:2]
    prompts = read_prompts(options.prompts)[1]
    if options.what == "rows":
        write_rows(options.out, rows(model, tokenizer, prompts[:ROWS_PROMPTS]))
        return 0
    wanted = [(FULL, "100%")]
    wanted += [(w.rpartition("=")[0], w.rpartition("=")[2]) for w in options.wanted]
    found = timings(model, tokenizer, prompts[0], wanted, options.rounds)
    device = Device.present()
    about = {
        "side": "kvkeep",
        "kvkeep": kvkeep.__version__,
        "mlx": device.mlx,
        "mlx-lm": device.mlx_lm,
        "blas": device.blas,
        "weights": weights_digest(options.model),
    }
    write_timings(options.out, about, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
