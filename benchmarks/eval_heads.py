"""What survives when streaming heads lose their rows: needle answers by head profile.

    python benchmarks/eval_heads.py fill DIR --prompts 16 --seed 1000
    python benchmarks/eval_heads.py score DIR PROFILE.json …

`fill` reads needle prompts with the stock model and keeps their caches (46 MB per prompt of 1,000
tokens). `score` answers each under every setting at once, as rows of one batch: retrieval heads see
the whole prompt, streaming heads its first and last rows, by a mask. An answer counts
if every one of its tokens is the model's first choice after the right tokens before it, which is to
say if greedy decoding gives exactly that answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvkeep  # isort: skip  # before mlx: it brings the fast BLAS
import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvkeep.attention import install
from kvkeep.demo_model import resolve_model
from kvkeep.haystack import needle_prompts
from kvkeep.spec import HeadProfile, load_head_profile

WINDOWS = ("4+64", "16+64", "8+128")
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.55)
BATCH = 24


@dataclass(frozen=True)
class Setting:
    """Which heads see everything, and what the others keep."""

    profile: str
    share: float
    sinks: int
    recent: int
    retrieval: frozenset[tuple[int, int]]


class MaskedRows(KVCache):
    """A prompt's rows for a batch of settings, each head reading its own part of them."""

    owns_attention = True

    def __init__(self, layer: Any, visible: mx.array) -> None:
        """`visible`: bool [B, H_kv, T], which prompt rows each setting's heads read."""
        super().__init__()
        self.rows = layer.keys_and_values()
        self.offset = self.prompt = layer.offset
        self.visible = visible

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The prompt's rows for each of the batch, and the new ones."""
        batch = keys.shape[0]
        self.offset += keys.shape[2]
        joined = [
            mx.concatenate([mx.broadcast_to(old, (batch, *old.shape[1:])), new], axis=2)
            for old, new in zip(self.rows, (keys, values), strict=True)
        ]
        return joined[0], joined[1]

    def attend(self, attention: Any, queries: Any, keys: Any, values: Any, **options: Any) -> Any:
        """Attention under each setting's mask."""
        batch, heads, count, _ = queries.shape
        causal = mx.tril(mx.ones((count, count), mx.bool_))
        front = mx.repeat(self.visible, heads // keys.shape[1], axis=1)[:, :, None]
        mask = mx.concatenate(
            [
                mx.broadcast_to(front, (batch, heads, count, self.prompt)),
                mx.broadcast_to(causal, (batch, heads, count, count)),
            ],
            axis=-1,
        )
        return attention(queries, keys, values, cache=None, mask=mask, **options)


def fill(args: argparse.Namespace) -> None:
    """Prefill and keep prompts."""
    model, tokenizer = mlx_lm.load(str(resolve_model(args.model)))[:2]
    args.folder.mkdir(parents=True, exist_ok=True)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    prompts = needle_prompts(count, args.prompts, args.tokens, kind=args.kind, seed=args.seed)
    for index, prompt in enumerate(prompts):
        file = args.folder / f"{index:03}.safetensors"
        if file.exists():
            continue
        message = [{"role": "user", "content": prompt.prompt}]
        tokens = list(tokenizer.apply_chat_template(message, add_generation_prompt=True))
        tokens += tokenizer.encode(prompt.answer_prefix, add_special_tokens=False)
        answer = tokenizer.encode(f" {prompt.answer}", add_special_tokens=False)
        cache = make_prompt_cache(model)
        body: Any = model.model  # the prompt's logits are not asked for
        body(mx.array(tokens[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        kept = json.dumps([tokens[-1:], answer, prompt.depth])
        kvkeep.save_prompt_cache(file, cache, {"needle": kept})
        print(f"{file.name}: {len(tokens)} tokens, depth {prompt.depth:.2f}", flush=True)


def settings_of(
    profiles: dict[str, HeadProfile], windows: Sequence[str], shares: Sequence[float]
) -> Iterator[Setting]:
    """The full cache, then every profile at every share and window."""
    first = next(iter(profiles.values()))
    yield Setting("full", 1.0, 0, 0, first.retrieval_heads(1.0))
    for window in windows:
        sinks, recent = map(int, window.split("+"))
        for name, profile in profiles.items():
            for share in shares:
                yield Setting(name, share, sinks, recent, profile.retrieval_heads(share))


def visible_rows(settings: Sequence[Setting], layer: int, heads: int, length: int) -> np.ndarray:
    """Which rows are read: bool [settings, H_kv, T]."""
    rows = np.arange(length)
    table = np.ones((len(settings), heads, length), bool)
    for index, setting in enumerate(settings):
        kept = (rows < setting.sinks) | (rows >= length - setting.recent)
        for head in range(heads):
            if (layer, head) not in setting.retrieval:
                table[index, head] = kept
    return table


def score(args: argparse.Namespace) -> None:
    """Answer the kept prompts under every setting, and print rates and bytes."""
    model: Any = mlx_lm.load(str(resolve_model(args.model)))[0]
    install(model)
    profiles = {path.stem: load_head_profile(path) for path in args.profiles}
    for seed in args.random:
        profiles[f"random-{seed}"] = shuffled(next(iter(profiles.values())), seed)
    settings = list(settings_of(profiles, args.windows, args.shares))
    hits, shares = [], []
    for file in sorted(args.folder.glob("*.safetensors"))[: args.prompts]:
        cache, metadata = kvkeep.load_prompt_cache(file, return_metadata=True)
        last, answer, _ = json.loads(metadata["needle"])
        hits.append([])
        shares.append([])
        for start in range(0, len(settings), BATCH):
            some = settings[start : start + BATCH]
            hits[-1] += answered(model, cache, some, last, answer)
            shares[-1] += [kept_share(cache, setting) for setting in some]
        print(f"{file.name}: {sum(hits[-1])} of {len(settings)} settings right", flush=True)
    kept = np.mean(shares, axis=0)
    result = [
        {
            "profile": s.profile,
            "share": s.share,
            "sinks": s.sinks,
            "recent": s.recent,
            "kept": round(float(kept[i]), 4),
            "right": int(sum(row[i] for row in hits)),
            "of_full": int(sum(row[i] and row[0] for row in hits)),
            "of": len(hits),
        }
        for i, s in enumerate(settings)
    ]
    if args.output:
        args.output.write_text(json.dumps(result, indent=0) + "\n", encoding="utf-8")
    full = result[0]["right"]
    print(f"full cache: {full} of {len(hits)}")
    for entry in result[1:]:
        print(
            f"{entry['profile']:12} {entry['sinks']:3}+{entry['recent']:<4} share"
            f" {entry['share']:.2f}  bytes {100 * entry['kept']:5.1f} %"
            f"  right {entry['right']}/{entry['of']} = {entry['right'] / max(full, 1):.2f} of full,"
            f" {entry['of_full']} of the {full}"
        )


def answered(
    model: Any, cache: list[Any], settings: Sequence[Setting], last: list[int], answer: list[int]
) -> list[bool]:
    """Whether each setting's greedy answer is exactly `answer`."""
    layers = []
    for index, layer in enumerate(cache):
        heads, length = layer.keys.shape[1], layer.offset
        layers.append(MaskedRows(layer, mx.array(visible_rows(settings, index, heads, length))))
    inputs = mx.array([last + answer[:-1]] * len(settings))
    found = np.asarray(mx.argmax(model(inputs, cache=layers), axis=-1))
    return [bool((row == np.array(answer)).all()) for row in found]


def kept_share(cache: list[Any], setting: Setting) -> float:
    """Bytes of the kept rows over those of the full cache."""
    total = kept = 0
    for index, layer in enumerate(cache):
        heads, length = layer.keys.shape[1], layer.offset
        for head in range(heads):
            full = (index, head) in setting.retrieval
            kept += length if full else min(setting.sinks + setting.recent, length)
            total += length
    return kept / total


def shuffled(profile: HeadProfile, seed: int) -> HeadProfile:
    """Random scores for the same heads: what a share of heads gives without knowing which."""
    draw = np.random.default_rng(seed)
    rows = {layer: tuple(draw.random(len(row)).tolist()) for layer, row in profile.scores.items()}
    return HeadProfile(
        profile.model, rows, profile.sinks, profile.recent, method="random", seed=seed
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    commands = parser.add_subparsers(required=True)
    filling = commands.add_parser("fill", help="prefill needle prompts and keep their caches")
    filling.add_argument("folder", type=Path)
    filling.add_argument("--prompts", type=int, default=16)
    filling.add_argument("--tokens", type=int, default=1000)
    filling.add_argument("--kind", default="number")
    filling.add_argument("--seed", type=int, default=1000)
    filling.set_defaults(act=fill)
    scoring = commands.add_parser("score", help="answer them under head profiles")
    scoring.add_argument("folder", type=Path)
    scoring.add_argument("profiles", type=Path, nargs="+")
    scoring.add_argument("--prompts", type=int, default=None, help="the first so many")
    scoring.add_argument("--windows", nargs="+", default=WINDOWS, help="sinks+recent, several")
    scoring.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="of retrieval heads"
    )
    scoring.add_argument("--random", type=int, nargs="*", default=[], help="seeds of random scores")
    scoring.add_argument("--output", type=Path, default=None, help="figures as JSON")
    scoring.set_defaults(act=score)
    args = parser.parse_args()
    args.act(args)


if __name__ == "__main__":
    main()
