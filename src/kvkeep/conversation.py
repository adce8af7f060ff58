"""Many turns over one cache, compacted as it grows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvkeep.attention import ProgressCallback
from kvkeep.caches import CompactCache, allocated_nbytes, is_compact, is_plain, leaves_of
from kvkeep.compaction import cache_nbytes
from kvkeep.errors import ConfigError
from kvkeep.generation import (
    RECOMMENDED,
    GenerationResponse,
    refuse_unevictable,
    stream_generate,
)
from kvkeep.policies import policy_of
from kvkeep.spec import EvictionConfig, SnapKVEvictionResult

Message = dict[str, str]


@dataclass(frozen=True)
class ConversationStats:
    """Where a conversation stands.

    Attributes:
        turns: messages of the user so far.
        positions: tokens that the cache has read, evicted ones included.
        rows: live rows per KV head, the mean over attention layers.
        live_nbytes: bytes of the live rows.
        allocated_nbytes: bytes of the buffers.
        compactions: how often rows were evicted since the cache was begun.
    """

    turns: int
    positions: int
    rows: float
    live_nbytes: int
    allocated_nbytes: int
    compactions: int


class Conversation:
    """Messages, and the cache that has read them.

    Each turn renders the whole chat template. What the cache has read already is matched as
    a prefix and only the rest is fed, then the cache is compacted to the budget again: rows
    bound the conversation, a share counts all positions so far. An answer's own rows come on
    top until the next turn. Where the template changes
    tokens that the cache has read, it is trimmed to the common prefix; where rows beyond
    that prefix were evicted, it is begun afresh.

    Nothing is lost when a turn is interrupted: what was answered so far stays a message, and
    cache and tokens agree again before the next turn.

    Args:
        model: an mlx-lm model.
        tokenizer: with a chat template.
        config: what to evict; None keeps everything.
        system_prompt: the first message, if any.
        max_kv_size: mlx-lm's rotating cache; without eviction only. As in mlx-lm, models
            that make their own caches take no notice of it.
        template_options: keywords for the chat template.
        on_restart: called with the reason when the cache is begun afresh.
        options: for every turn's `stream_generate` (`max_tokens`, `sampler`, …).

    Attributes:
        messages: role and content, system prompt included.
        tokens: token ids that the cache has read, in order.
        cache: mlx-lm's cache list.
        last: the last response, or None.
        kv: figures of the last turn's compaction, or None.

    Raises:
        ConfigError: no chat template, or options that exclude each other.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        config: EvictionConfig | None = RECOMMENDED,
        system_prompt: str | None = None,
        max_kv_size: int | None = None,
        template_options: dict[str, Any] | None = None,
        on_restart: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        wrap = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        if not wrap.has_chat_template:
            raise ConfigError(
                "the model has no chat template",
                expected="a tokenizer with one",
                received="none",
                remedy="Use kvkeep generate.",
            )
        if config is not None:
            refuse_unevictable(config, {**options, "max_kv_size": max_kv_size})
            if "replay" in policy_of(config).needs:
                raise ConfigError(
                    f"policy {config.policy!r} serves one turn only: it reads all tokens again",
                    expected="a policy that scores what a turn adds",
                    received=repr(config.policy),
                    remedy="Use another policy (`kvkeep policies` lists them).",
                )
            if options.get("kv_bits") is not None:
                raise ConfigError(
                    "a conversation cannot evict quantised rows",
                    expected="kv_bits or eviction",
                    received=f"kv_bits={options['kv_bits']} and a {config.policy!r} config",
                )
        self.model, self.tokenizer, self.config = model, wrap, config
        self._system, self._max_kv_size = system_prompt, max_kv_size
        self._template_options = dict(template_options or {})
        self._on_restart = on_restart or (lambda _: None)
        self._options = options
        self._turn: Generator[GenerationResponse, None, None] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system prompt, and begin a new cache."""
        self._end_turn()
        self.messages: list[Message] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self.last: GenerationResponse | None = None
        self._begin_cache()

    def add_user(
        self, text: str, *, prompt_progress_callback: ProgressCallback | None = None
    ) -> Generator[GenerationResponse, None, None]:
        """The answer to a message, as it is generated.

        Close the generator (or let it end) before you look at the attributes; the next call
        does so if you do not.

        Raises:
            ConfigError: the chat template refuses the messages.
            KvkeepError: as in `stream_generate`. Before the first token, the message is
                taken back.
        """
        self._end_turn()
        self._turn = self._answer(text, prompt_progress_callback)
        return self._turn

    @property
    def stats(self) -> ConversationStats:
        """Where the conversation stands; measured on the arrays."""
        rows = [_rows_of(layer) for layer in leaves_of(self.cache) if _offset_of(layer)]
        return ConversationStats(
            turns=sum(message["role"] == "user" for message in self.messages),
            positions=len(self.tokens),
            rows=float(np.mean(rows)) if rows else 0.0,
            live_nbytes=cache_nbytes(self.cache),
            allocated_nbytes=allocated_nbytes(self.cache),
            compactions=self._compactions,
        )

    def _answer(
        self, text: str, progress: ProgressCallback | None
    ) -> Generator[GenerationResponse, None, None]:
        before = self.messages
        self.messages = [*before, {"role": "user", "content": text}]
        turn = _Turn()
        try:
            prompt = self._rendered()
            rest = self._reuse(prompt)
            turn.read, turn.layers = prompt, leaves_of(self.cache)
            responses = stream_generate(
                self.model,
                self.tokenizer,
                rest,
                config=self.config,
                prompt_cache=self.cache,
                prompt_progress_callback=progress,
                **self._options,
            )
            with contextlib.closing(responses):
                for response in responses:
                    turn.take(response)
                    self.last = response
                    yield response
            turn.complete = True
        except GeneratorExit:
            turn.complete = turn.started  # closed between two steps: nothing is half-done
            raise
        except Exception:
            if not turn.started:
                self.messages = before
            raise
        finally:
            if self.messages is not before:
                self.messages.append({"role": "assistant", "content": turn.text})
            self._settle(turn)

    def _rendered(self) -> list[int]:
        """Token ids of the whole conversation up to where the answer begins."""
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    self.messages, add_generation_prompt=True, **self._template_options
                )
            )
        except TemplateError as error:
            raise ConfigError(
                "the chat template refuses the messages", received=str(error)
            ) from error

    def _reuse(self, prompt: list[int]) -> list[int]:
        """Bring the cache to a prefix of `prompt`; returns the rest, at least one token."""
        common = min(_common_prefix(self.tokens, prompt), len(prompt) - 1)
        if common < len(self.tokens) and not self._trim_to(common):
            self._begin_cache()
            self._on_restart(
                "the chat template changed what was read, and rows before that are gone:"
                " reading the conversation again"
            )
        return prompt[len(self.tokens) :]

    def _trim_to(self, length: int) -> bool:
        """Forget all but the first `length` tokens, if no row from there on is missing."""
        leaves = leaves_of(self.cache)
        for layer in leaves:
            offset = _offset_of(layer)
            if offset is None or not layer.is_trimmable() or _whole_from(layer) > length:
                return False
        for layer in leaves:
            layer.trim(layer.offset - length)
        if any(layer.offset != length for layer in leaves):
            return False  # chunked layers may give less than they are asked for
        del self.tokens[length:]
        return True

    def _settle(self, turn: _Turn) -> None:
        """Make tokens and cache agree on what was read, whatever cut the turn short."""
        if turn.kv is not None:
            self.kv = turn.kv
            self._compactions += turn.kv.kv_layers > 0
        if turn.read is None:
            return
        offsets = [_offset_of(layer) for layer in leaves_of(self.cache)]
        known = [offset for offset in offsets if offset is not None]
        read = min([*known, len(turn.read)])
        self.tokens = turn.read[:read]
        # Layers that were cut short and cannot say so, or of which only some were evicted.
        broken = not turn.complete and (len(known) < len(offsets) or self._half_evicted(turn))
        if broken or (any(offset != read for offset in known) and not self._trim_to(read)):
            self._begin_cache()

    def _half_evicted(self, turn: _Turn) -> bool:
        """Whether the turn's compaction has replaced some of the evictable layers, not all."""
        pairs = zip(leaves_of(self.cache), turn.layers, strict=True)
        replaced = {new is not old for new, old in pairs if is_plain(old) or is_compact(old)}
        return self.config is not None and len(replaced) == 2

    def _begin_cache(self) -> None:
        self.cache: list[Any] = make_prompt_cache(self.model, self._max_kv_size)
        self.tokens: list[int] = []
        self.kv: SnapKVEvictionResult | None = None
        self._compactions = 0

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.close()
            self._turn = None


class _Turn:
    """How far one turn has come.

    Attributes:
        read: token ids that the cache will have read when every step so far is done, or None.
        layers: the caches of the list before the turn, as `leaves_of` counts them.
        text: the answer so far.
        complete: no step was cut short.
        started: a token was generated.
        kv: figures of its compaction.
    """

    def __init__(self) -> None:
        self.read: list[int] | None = None
        self.layers: list[Any] = []
        self.text = ""
        self.complete = self.started = False
        self.kv: SnapKVEvictionResult | None = None

    def take(self, response: GenerationResponse) -> None:
        """Add a token, whose row mlx-lm has already queued."""
        if self.read is not None:
            self.read.append(response.token)
        self.text += response.text
        self.kv, self.started = response.kv, True


def _offset_of(layer: Any) -> int | None:
    """The layer's next position, where it has one (state-space layers have none)."""
    offset = getattr(layer, "offset", None)
    return offset if isinstance(offset, int) else None


def _rows_of(layer: Any) -> float:
    """Live rows per KV head of an attention layer."""
    if isinstance(layer, CompactCache):
        return float(np.mean(layer.live_head_rows))
    return float(layer.size() or layer.offset)


def _whole_from(layer: Any) -> int:
    """The position from which on the layer holds every row in every head."""
    if not isinstance(layer, CompactCache):
        return 0
    offset = layer.offset
    holes = []
    for held in layer.head_position_arrays():
        tail = held - np.arange(len(held)) == offset - len(held)
        holes.append(offset - int(np.count_nonzero(tail)))
    return max(holes)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
