# pyright: reportMissingImports=false
"""veloxquant-mlx's side: runs in its own environment, without kvkeep.

    python velox_side.py answers|timings --prompts FILE --model FOLDER --out FILE --blas FILE

Its caches evict while mlx-lm's own generation reads the prompt (all but its last token, in one
chunk). The BLAS that kvkeep's process uses is loaded here as well, which the package by itself
does not: otherwise a CPU's times would be of two libraries.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load_blas(file: Path) -> str:
    """Load the fast BLAS by kvkeep's own module, which imports nothing of the rest."""
    spec = importlib.util.spec_from_file_location("kvkeep_blas", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.load().name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("answers", "timings"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blas", type=Path, required=True, help="kvkeep's blas.py")
    parser.add_argument("--limit", type=int, help="prompts per task, of those in the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wanted", nargs="*", default=[], help="METHOD=BUDGET to time")
    options = parser.parse_args()
    blas = load_blas(options.blas)  # before mlx

    from peer_answers import AnswerFile, read_prompts, weights_digest, write_timings
    from peer_plan import FULL

    names = ("veloxquant-mlx", "mlx", "mlx-lm", "transformers")
    told = {
        "side": "veloxquant-mlx",
        **{name: importlib.metadata.version(name) for name in names},
        "weights": weights_digest(options.model),
    }
    asked, prompts = read_prompts(options.prompts, options.limit)
    side = Side(options.model)
    if options.what == "answers":
        side.answers(prompts, AnswerFile(options.out, {**told, **asked}))
    else:
        wanted = [(FULL, "100%")]
        wanted += [(w.rpartition("=")[0], w.rpartition("=")[2]) for w in options.wanted]
        found = side.timings(prompts[0], wanted, options.rounds)
        write_timings(options.out, {**told, "blas": blas}, found)
    return 0


class Side:
    """The model, and what is asked of it."""

    def __init__(self, folder: Path) -> None:
        import mlx_lm

        self.model: Any
        self.model, self.tokenizer = mlx_lm.load(str(folder))[:2]

    def cache(self, setting: str, budget: str, length: int) -> list[Any]:
        """An empty cache of a method, for a prompt whose first `length` tokens are compressed."""
        from mlx_lm.models.cache import make_prompt_cache
        from peer_plan import FULL, VELOX, rows_of
        from veloxquant_mlx import KVCacheBuilder, KVCacheConfig

        if setting == FULL:
            return make_prompt_cache(self.model)
        method = next(velox for velox in VELOX if velox.name == setting)
        rows = rows_of(budget, length)
        options = {name: int(value.format(rows=rows)) for name, value in method.options.items()}
        dim = self.model.args.head_dim or self.model.args.hidden_size
        config = KVCacheConfig(method=method.method, head_dim=dim, **options)
        return KVCacheBuilder.for_model(self.model, config)

    def steps(self, ids: list[int], cache: list[Any], count: int) -> Iterator[int]:
        """Greedy tokens after a prompt, by mlx-lm's own loop, without an end."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(
            mx.array(ids), self.model, prompt_cache=cache, max_tokens=count
        ):
            yield int(token)

    def answers(self, prompts: list[Any], file: Any) -> None:
        """Ask what the file does not hold yet."""
        from peer_answers import Answer
        from peer_plan import BUDGETS, FULL, VELOX

        wanted = [(FULL, "100%"), *((v.name, b) for v in VELOX for b in BUDGETS)]
        for number, prompt in enumerate(prompts):
            missing = [key for key in wanted if (prompt.task, prompt.index, *key) not in file]
            if not missing:
                continue
            start = time.perf_counter()
            ids = list(self.tokenizer.encode(prompt.text, add_special_tokens=False))
            prompt.require_ids(ids)
            for setting, budget in missing:
                cache = self.cache(setting, budget, len(ids) - 1)
                watched, said = Watched(cache), []
                for token in self.steps(ids, cache, prompt.max_tokens):
                    if token in self.tokenizer.eos_token_ids:
                        break
                    said.append(token)
                text = self.tokenizer.decode(said)
                rows = sum(watched.rows) / len(watched.rows)
                where = (prompt.task, prompt.index, setting, budget)
                file.add(Answer(*where, text, rows, watched.nbytes))
            took = time.perf_counter() - start
            words = f"{number + 1}/{len(prompts)}: {prompt.task}, {took:.0f} s"
            print(f"veloxquant-mlx {words}", flush=True)

    def timings(self, prompt: Any, wanted: list[tuple[str, str]], rounds: int) -> list[Any]:
        """Seconds to the first token and of a step after it, one value per round, interleaved."""
        from peer_answers import Timing

        steps, ids = 24, list(prompt.ids)
        found: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in wanted}
        for number in range(-1, rounds):  # the first round warms up
            for key in wanted[:1] if number < 0 else wanted:
                cache = self.cache(*key, len(ids) - 1)
                start = first = time.perf_counter()
                for at, _ in enumerate(self.steps(ids, cache, steps + 1)):
                    if at == 0:
                        first = time.perf_counter()
                step = (time.perf_counter() - first) / steps
                if number >= 0:  # what leads to the first token is a step as well
                    found[key].append((first - start - step, step))
        return [
            Timing(*key, tuple(p for p, _ in values), tuple(s for _, s in values))
            for key, values in found.items()
        ]


class Watched:
    """What attention gets of a cache in the first step after the prompt, its own row left out.

    The caches' own counters differ by method, and their buffers have room to grow.

    Attributes:
        rows: per layer.
        nbytes: of K and V, all layers together.
    """

    def __init__(self, cache: list[Any]) -> None:
        self.rows: list[int] = []
        self.nbytes = 0
        for layer in cache:
            layer.update_and_fetch = self._watching(layer.update_and_fetch)

    def _watching(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        seen = False

        def watched(keys: Any, values: Any, *more: Any) -> Any:
            nonlocal seen
            held = fetch(keys, values, *more)
            if keys.shape[2] == 1 and not seen:
                seen = True
                rows = held[0].shape[2] - 1
                self.rows.append(rows)
                self.nbytes += sum(array.nbytes // (rows + 1) * rows for array in held)
            return held

        return watched


if __name__ == "__main__":
    sys.exit(main())
