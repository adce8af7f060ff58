"""Prefill in chunks under observation, with mlx-lm's own caches and chunk borders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvkeep.attention import seam
from kvkeep.attention.capture import SnapKVAttentionCapture
from kvkeep.attention.observe import WindowObserver, observing, require_visible

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class Observation:
    """What a prefill saw of the window's queries.

    Attributes:
        observers: by layer index, of the layers that the seam saw.
        capture: summed scores of the layers that call `mx.fast` attention themselves, where
            some evictable ones do, else None.
    """

    observers: Mapping[int, WindowObserver]
    capture: SnapKVAttentionCapture | None = None

    @property
    def all_seen(self) -> bool:
        """Whether every observed layer's attention went through the seam."""
        return all(observer.calls for observer in self.observers.values())


def observed_prefill(
    model: Any,
    tokens: Sequence[int],
    cache: list[Any],
    layers: list[int],
    *,
    window: int,
    policy: str,
    allow_capture: bool = False,
    score_chunk_size: int = 8,
    step: int = 2048,
    progress: ProgressCallback | None = None,
) -> Observation:
    """Run `tokens` through the model into `cache`, keeping the last W queries per layer.

    Chunks, evaluation and `progress(done, total)` are as in mlx-lm's `generate_step`, so
    the rows are bit-equal to those of a stock prefill with the same step.

    Args:
        layers: cache indices that will be evicted; they are observed.
        window: W; 0 keeps no query, for policies that need none: a model whose queries
            cannot be seen is then accepted.
        policy: named in refusals.
        allow_capture: let a model that calls `mx.fast` attention itself be scored by
            `SnapKVAttentionCapture` (scores of the whole model only).

    Raises:
        UnsupportedModelError: the window's queries cannot be seen; or the seam sees that
            several layers read one cache, or that attention's mask carries scores. Raised
            after the first chunk was built and before it was computed.
    """
    seam.install(model)
    total, done = len(tokens), 0
    report = progress or (lambda *_: None)
    report(0, total)
    use_capture = allow_capture and window > 0
    capture = SnapKVAttentionCapture(window, score_chunk_size) if use_capture else None
    with observing(cache, layers, window, total) as observers:
        while done < total:
            chunk = mx.array(list(tokens[done : done + step]))[None]
            # The first chunk is captured too: it tells early whether there is anything to see.
            if capture is not None and (done == 0 or done + chunk.shape[1] > total - window):
                with capture:
                    model(chunk, cache=cache)
            else:
                model(chunk, cache=cache)
            if done == 0:
                if capture is not None and (
                    capture.calls == 0 or len(_seen(observers)) == len(layers)
                ):
                    capture = None
                seen = observers if capture is None else _seen(observers)
                require_visible(seen, model, policy, queries=window > 0)
            windows = [o.queries for o in observers.values() if o.queries is not None]
            mx.eval([c.state for c in cache], windows)
            done += chunk.shape[1]
            report(done, total)
            mx.clear_cache()
    return Observation(observers if capture is None else _seen(observers), capture)


def _seen(observers: Mapping[int, WindowObserver]) -> Mapping[int, WindowObserver]:
    return {layer: observer for layer, observer in observers.items() if observer.calls}
