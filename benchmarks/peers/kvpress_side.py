# pyright: reportMissingImports=false
"""Kvpress's side: runs in its own environment, without kvkeep or MLX.

    python kvpress_side.py answers|rows|timings --prompts FILE --model FOLDER --out FILE

Each prompt is prefilled once. Kvpress compresses in a hook that runs after a layer's attention,
so a press changes nothing that later layers see of the prompt: each press's own `forward_hook` is
called with what that one prefill handed the layers, on a copy of the cache. On the first prompt
of a run this is checked against `with press(model):` around a prefill of its own, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.metadata
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import kvpress
import numpy as np
import torch
import transformers
from peer_answers import (
    Answer,
    AnswerFile,
    Prompt,
    Timing,
    read_prompts,
    rows_key,
    weights_digest,
    write_rows,
    write_timings,
)
from peer_plan import BUDGETS, FULL, PAIRS, ROWS_PROMPTS, Pair, ratio_of
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

transformers.utils.logging.disable_progress_bar()
logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip says at each use that it is slow


@dataclasses.dataclass
class Prefilled:
    """A prompt but its last token, read once.

    Attributes:
        ids: [1, T].
        cache: exact; stays as it is.
        calls: per layer, what its attention was called with and gave.
    """

    ids: torch.Tensor
    cache: DynamicCache
    calls: list[tuple[Any, Any, dict[str, Any], Any]]


@dataclasses.dataclass
class EveryRatio(kvpress.KVzipPress):
    """KVzip scored once, its masks taken at every ratio."""

    ratios: tuple[float, ...] = ()
    masks: dict[float, list[Any]] = dataclasses.field(default_factory=dict)

    def compress_post(self, model: Any) -> None:
        """As KVzip does, for each ratio."""
        for ratio in self.ratios:
            self.compression_ratio = ratio
            super().compress_post(model)
            self.masks[ratio] = [a.masked_key_indices for a in attentions(model)]


class Side:
    """The model, and what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.pipe = kvpress.KVPressTextGenerationPipeline(
            model=self.model, tokenizer=self.tokenizer
        )

    def ids(self, prompt: Prompt) -> torch.Tensor:
        """[1, T + 1] token ids of a prompt, by this side's own tokenizer.

        Raises:
            ValueError: they are not kvkeep's.
        """
        own = self.tokenizer.encode(prompt.text, add_special_tokens=False)
        prompt.require_ids(own)
        return torch.tensor([own])

    def prefill(self, ids: torch.Tensor) -> DynamicCache:
        """Read a prompt but its last token, under whatever press is open."""
        cache = DynamicCache()
        self.model.model(input_ids=ids[:, :-1], past_key_values=cache)
        return cache

    def prefilled(self, ids: torch.Tensor) -> Prefilled:
        """The same, with what each layer's attention was called with."""
        calls: list[tuple[Any, Any, dict[str, Any], Any]] = []
        hooks = [
            attention.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
            for attention in attentions(self.model)
        ]
        try:
            return Prefilled(ids, self.prefill(ids), calls)
        finally:
            for hook in hooks:
                hook.remove()

    def compressed(self, read: Prefilled, press: Any) -> DynamicCache:
        """What a press leaves of a prompt. Masks stay on the layers until `unmask`."""
        cache = copy.deepcopy(read.cache)
        self.unmask()
        with press(self.model):  # what a press sets up; nothing is prefilled in it
            pass
        for module, inputs, kwargs, output in read.calls:
            press.forward_hook(module, inputs, {**kwargs, "past_key_values": cache}, output)
        return cache

    def zipped(self, read: Prefilled, budgets: list[str]) -> Iterator[tuple[str, DynamicCache]]:
        """KVzip at several budgets, scored once."""
        press = EveryRatio(compression_ratio=0.5, ratios=tuple(map(ratio_of, budgets)))
        with press(self.model):
            cache = self.prefill(read.ids)
        for budget in budgets:
            for attention, mask in zip(
                attentions(self.model), press.masks[ratio_of(budget)], strict=True
            ):
                attention.masked_key_indices = mask
            yield budget, copy.deepcopy(cache)

    def unmask(self) -> None:
        """Take head-wise masks off."""
        for attention in attentions(self.model):
            attention.masked_key_indices = None

    def answer(self, read: Prefilled, cache: DynamicCache, max_tokens: int) -> str:
        """Kvpress's own greedy answer after the prompt's last token."""
        return self.pipe.generate_answer(
            question_ids=read.ids[:, -1:],
            cache=cache,
            context_length=read.ids.shape[1] - 1,
            max_new_tokens=max_tokens,
        )

    def measured(self, cache: DynamicCache) -> tuple[float, int]:
        """Rows per head that attention sees (the mean), and bytes held."""
        rows = held = 0
        heads = 0
        layers: list[Any] = list(cache.layers)
        for attention, layer in zip(attentions(self.model), layers, strict=True):
            mask = getattr(attention, "masked_key_indices", None)
            hidden = 0 if mask is None else len(mask[0])
            _, kv_heads, length, _ = layer.keys.shape
            rows += kv_heads * length - hidden
            heads += kv_heads
            held += layer.keys.nbytes + layer.values.nbytes
        return rows / heads, held


def attentions(model: Any) -> list[Any]:
    """The attention module of each layer."""
    return [layer.self_attn for layer in model.model.layers]


def press_of(pair: Pair, budget: str) -> Any:
    """A pair's press at a budget: the plan's text, so that a report shows what ran."""
    press = eval(pair.theirs, {"__builtins__": {}}, vars(kvpress))
    press.compression_ratio = ratio_of(budget)
    return press


def require_same(side: Side, read: Prefilled) -> None:
    """Hold the one prefill for all presses against a prefill under each.

    Raises:
        RuntimeError: names a press whose cache or masks differ.
    """
    for pair in PAIRS:
        if pair.name == "kvzip":
            continue  # prefilled by itself
        press = press_of(pair, BUDGETS[0])
        shared = side.compressed(read, press)
        masks = [getattr(a, "masked_key_indices", None) for a in attentions(side.model)]
        side.unmask()
        with press_of(pair, BUDGETS[0])(side.model):
            own = side.prefill(read.ids)
        for number, attention in enumerate(attentions(side.model)):
            one: Any = shared.layers[number]
            other: Any = own.layers[number]
            same = torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
            mask = getattr(attention, "masked_key_indices", None)
            if mask is not None or masks[number] is not None:
                same = same and all(map(torch.equal, mask or (), masks[number] or ()))
            if not same:
                raise RuntimeError(f"{pair.name}: layer {number} is not what kvpress itself leaves")
        side.unmask()


def answers(side: Side, prompts: list[Prompt], file: AnswerFile) -> None:
    """Ask what the file does not hold yet."""
    checked = False
    for number, prompt in enumerate(prompts):
        wanted = [(FULL, "100%"), *((pair.name, budget) for pair in PAIRS for budget in BUDGETS)]
        missing = [key for key in wanted if (prompt.task, prompt.index, *key) not in file]
        if not missing:
            continue
        start = time.perf_counter()
        read = side.prefilled(side.ids(prompt))
        if not checked:
            require_same(side, read)
            checked = True
        for (setting, budget), cache in caches(side, read, missing):
            rows, held = side.measured(cache)
            text = side.answer(read, cache, prompt.max_tokens)
            file.add(Answer(prompt.task, prompt.index, setting, budget, text, rows, held))
        side.unmask()
        took = time.perf_counter() - start
        print(f"kvpress {number + 1}/{len(prompts)}: {prompt.task}, {took:.0f} s", flush=True)


def caches(
    side: Side, read: Prefilled, missing: list[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], DynamicCache]]:
    """A compressed cache for each missing setting, its masks in place."""
    for pair in PAIRS:
        budgets = [budget for setting, budget in missing if setting == pair.name]
        if pair.name == "kvzip" and budgets:
            for budget, cache in side.zipped(read, budgets):
                yield (pair.name, budget), cache
            continue
        for budget in budgets:
            yield (pair.name, budget), side.compressed(read, press_of(pair, budget))
    side.unmask()
    if (FULL, "100%") in missing:
        yield (FULL, "100%"), copy.deepcopy(read.cache)


def rows(side: Side, prompts: list[Prompt]) -> dict[str, np.ndarray]:
    """Which rows each press leaves: bool [L, H_kv, T] by prompt, setting and budget."""
    found = {}
    wanted = [(pair.name, budget) for pair in PAIRS for budget in BUDGETS]
    for prompt in prompts:
        read = side.prefilled(side.ids(prompt))
        for (setting, budget), cache in caches(side, read, wanted):
            layers = zip(attentions(side.model), read.cache.layers, cache.layers, strict=True)
            kept = np.stack([kept_of(*layer) for layer in layers])
            found[rows_key(prompt, setting, budget)] = kept
    return found


def kept_of(attention: Any, exact: Any, compressed: Any) -> np.ndarray:
    """Bool [H_kv, T]: the exact rows that are there, found by their keys, and not masked."""
    before, after = exact.keys[0].numpy(), compressed.keys[0].numpy()
    kept = np.zeros(before.shape[:2], np.bool_)
    for head in range(len(before)):
        position = {row.tobytes(): at for at, row in enumerate(before[head])}
        kept[head, [position[row.tobytes()] for row in after[head]]] = True
    mask = getattr(attention, "masked_key_indices", None)
    if mask is not None:
        kept[mask[1].numpy(), mask[2].numpy()] = False
    return kept


def timings(side: Side, prompt: Prompt, wanted: list[tuple[str, str]], rounds: int) -> list[Timing]:
    """Prefill under each press and decode steps after it, one value per round, interleaved."""
    ids, pairs = side.ids(prompt), {pair.name: pair for pair in PAIRS}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in wanted}
    for number in range(-1, rounds):  # the first round warms up
        for key in wanted[:1] if number < 0 else wanted:
            side.unmask()
            start = time.perf_counter()
            if key[0] == FULL:
                cache = side.prefill(ids)
            else:
                with press_of(pairs[key[0]], key[1])(side.model):
                    cache = side.prefill(ids)
            prefill = time.perf_counter() - start
            step = decode_step(side, cache, ids)
            if number >= 0:
                found[key].append((prefill, step))
    side.unmask()
    return [
        Timing(*key, tuple(p for p, _ in values), tuple(s for _, s in values))
        for key, values in found.items()
    ]


def decode_step(side: Side, cache: DynamicCache, ids: torch.Tensor, steps: int = 24) -> float:
    """Seconds of a step, without an end: `generate_answer` stops where an answer ends."""
    position, token = ids.shape[1] - 1, ids[:, -1:]
    start = time.perf_counter()
    for number in range(steps):
        logits = side.model(
            input_ids=token,
            past_key_values=cache,
            position_ids=torch.tensor([[position + number]]),
        ).logits
        token = logits[:, -1:].argmax(dim=-1)
    return (time.perf_counter() - start) / steps


def about(folder: Path) -> dict[str, Any]:
    """What the answers depend on."""
    versions = {p: importlib.metadata.version(p) for p in ("kvpress", "torch", "transformers")}
    return {"side": "kvpress", **versions, "weights": weights_digest(folder)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("answers", "rows", "timings"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="prompts per task, of those in the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wanted", nargs="*", default=[], help="SETTING=BUDGET to time")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    asked, prompts = read_prompts(options.prompts, options.limit)
    with torch.no_grad():
        side = Side(options.model)
        if options.what == "answers":
            answers(side, prompts, AnswerFile(options.out, {**about(options.model), **asked}))
        elif options.what == "rows":
            write_rows(options.out, rows(side, prompts[:ROWS_PROMPTS]))
        else:
            wanted = [(FULL, "100%")]
            wanted += [(w.rpartition("=")[0], w.rpartition("=")[2]) for w in options.wanted]
            found = timings(side, prompts[0], wanted, options.rounds)
            told = {**about(options.model), "threads": torch.get_num_threads()}
            write_timings(options.out, told, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
