"""A store of prompt caches that tells exact from compact."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from kvkeep.caches import allocated_nbytes
from kvkeep.errors import CacheError
from kvkeep.spec import EvictionConfig

Kind = Literal["exact", "compact"]
#: What an entry's last token ended, from the first to be let go to the last.
ROLES = ("assistant", "user", "system")


@dataclass(frozen=True, eq=False)
class StoredPrompt:
    """Layers that hold a prompt's prefix.

    Attributes:
        model: whose layers they are; entries of two models never meet.
        tokens: int64 [T], the tokens that the layers have read.
        layers: one cache per layer, T positions in each that counts them.
        config: what evicted their rows; None is exact.
        compacted_at: tokens that were read when rows were last evicted; 0 is exact. The
            rows chosen then fit those tokens only.
        role: one of `ROLES`.
        nbytes: bytes of the layers' buffers.
    """

    model: Hashable
    tokens: np.ndarray
    layers: list[Any]
    config: EvictionConfig | None
    compacted_at: int
    role: str
    nbytes: int

    @property
    def kind(self) -> Kind:
        """Whether rows are gone."""
        return "exact" if self.config is None else "compact"


@dataclass(frozen=True)
class Hit:
    """An entry that serves a prompt.

    Attributes:
        entry: the entry.
        length: tokens of the prompt that it serves; the layers are trimmed to them.
    """

    entry: StoredPrompt
    length: int


@dataclass(eq=False)
class PromptStore:
    """Keeps prompt caches for prompts that begin with the same tokens.

    An exact entry serves any prefix of its tokens if its layers can be trimmed, else all of
    them. A compact entry serves prompts of its own eviction configuration, and only those that
    begin with everything that was read when its rows were chosen: it is never trimmed below
    that. Exact entries that a longer one makes needless are dropped; a compact one drops none.

    The store is not safe for threads: mlx's arrays are not either.

    Attributes:
        max_entries: entries that are kept at most.
        max_nbytes: bytes that are kept at most, or None.
    """

    max_entries: int = 10
    max_nbytes: int | None = None
    _entries: OrderedDict[int, StoredPrompt] = field(default_factory=OrderedDict, init=False)
    _made: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[StoredPrompt]:
        """The entries, the least recently used first."""
        return iter(list(self._entries.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all entries' buffers."""
        return sum(entry.nbytes for entry in self._entries.values())

    def find(
        self,
        model: Hashable,
        tokens: Sequence[int],
        *,
        config: EvictionConfig | None = None,
        unread: int = 1,
        compact_unread: int | None = None,
        accept: Callable[[StoredPrompt], bool] = lambda _: True,
    ) -> Hit | None:
        """The entry that serves most of a prompt.

        Of equal ones, a compact one whose rows were chosen for just these tokens, else an
        exact one.

        Args:
            model: as it was stored.
            tokens: T token ids.
            config: what compact entries must have been evicted by; None asks for exact ones.
            unread: tokens at the prompt's end that no exact entry may serve.
            compact_unread: the same of compact entries; `unread` if None.
            accept: whether the caller can go on from an entry.
        """
        prompt = np.asarray(tokens, dtype=np.int64)
        best: Hit | None = None
        for entry in self._entries.values():
            if entry.model != model or entry.config not in (None, config):
                continue
            left = unread
            if entry.config is not None and compact_unread is not None:
                left = compact_unread
            length = _served(entry, prompt, left)
            if not length or not accept(entry):
                continue
            if best is None or _rank(entry, length) > _rank(best.entry, best.length):
                best = Hit(entry, length)
        return best

    def take(self, hit: Hit) -> list[Any]:
        """Copies of a hit's layers that hold `hit.length` tokens; arrays are shared until
        they are written to. The entry becomes the most recently used.

        Raises:
            CacheError: a layer did not trim by as much as it was told.
        """
        for key, entry in self._entries.items():
            if entry is hit.entry:
                self._entries.move_to_end(key)
                break
        layers = copy.deepcopy(hit.entry.layers)
        surplus = len(hit.entry.tokens) - hit.length
        for layer in layers if surplus else ():
            trimmed = layer.trim(surplus)
            if trimmed != surplus:
                raise CacheError(
                    f"a {type(layer).__name__} was trimmed by another number of tokens",
                    expected=f"{surplus} tokens",
                    received=f"{trimmed} tokens",
                )
        return layers

    def insert(
        self,
        model: Hashable,
        tokens: Sequence[int],
        layers: list[Any],
        *,
        config: EvictionConfig | None = None,
        compacted_at: int = 0,
        role: str = "assistant",
    ) -> StoredPrompt:
        """Keep layers under the tokens that they have read; they belong to the store then.

        Their arrays are evaluated: a lazy slice of a batch keeps the whole batch alive.

        Args:
            tokens: T token ids.
            layers: one cache per layer, each at position T where it counts positions.
            config, compacted_at, role: as in `StoredPrompt`.

        Raises:
            CacheError: a layer is at another position, or `compacted_at` is none of a
                compact cache of so many tokens.
        """
        entry = _made(model, tokens, layers, config, compacted_at, role)
        mx.eval([layer.state for layer in layers if not layer.empty()])
        for key, old in list(self._entries.items()):
            if _replaces(entry, old):
                del self._entries[key]
        self._made += 1
        self._entries[self._made] = entry
        self.trim_to(n_sequences=self.max_entries, n_bytes=self.max_nbytes)
        return entry

    def trim_to(
        self,
        *,
        n_sequences: int | None = None,
        n_bytes: int | None = None,
        keep: StoredPrompt | None = None,
    ) -> None:
        """Let entries go until so many, or so many bytes, are left.

        Answers go first, unless more prompts than answers are stored; system prompts last.
        Among equals the least recently used goes.

        Args:
            keep: an entry that stays, whatever the bounds.
        """
        most, size = max(0, n_sequences or 0), self.nbytes
        while (n_sequences is not None and len(self) > most) or (
            n_bytes is not None and size > max(0, n_bytes)
        ):
            key = self._next_to_go(keep)
            if key is None:
                return
            size -= self._entries.pop(key).nbytes

    def clear(self) -> None:
        """Let every entry go."""
        self._entries.clear()

    def _next_to_go(self, keep: StoredPrompt | None) -> int | None:
        by_role: dict[str, list[int]] = {role: [] for role in ROLES}
        for key, entry in self._entries.items():
            if entry is not keep:
                by_role[entry.role].append(key)
        for role, next_role in pairwise(ROLES):
            if by_role[role] and len(by_role[role]) >= len(by_role[next_role]):
                return by_role[role][0]
        return next((by_role[role][0] for role in reversed(ROLES) if by_role[role]), None)


def _made(
    model: Hashable,
    tokens: Sequence[int],
    layers: list[Any],
    config: EvictionConfig | None,
    compacted_at: int,
    role: str,
) -> StoredPrompt:
    read = np.asarray(tokens, dtype=np.int64)
    for layer in layers:
        offset = getattr(layer, "offset", None)
        if isinstance(offset, int) and offset != len(read):
            raise CacheError(
                f"a {type(layer).__name__} has not read the tokens that it is stored under",
                expected=f"offset {len(read)}",
                received=f"offset {offset}",
            )
    if (compacted_at > 0) != (config is not None) or compacted_at > len(read):
        raise CacheError(
            "no such compact cache",
            expected=f"compacted at 1 to {len(read)} tokens, or 0 with no config",
            received=f"{compacted_at} tokens, config {config!r}",
        )
    return StoredPrompt(model, read, layers, config, compacted_at, role, allocated_nbytes(layers))


def _served(entry: StoredPrompt, prompt: np.ndarray, unread: int) -> int:
    """Tokens of the prompt that an entry serves, 0 if none."""
    limit = min(len(entry.tokens), len(prompt) - unread)
    if limit < max(entry.compacted_at, 1):
        return 0
    differ = np.flatnonzero(entry.tokens[:limit] != prompt[:limit])
    length = int(differ[0]) if len(differ) else limit
    if length < max(entry.compacted_at, 1):
        return 0
    if length < len(entry.tokens) and not all(layer.is_trimmable() for layer in entry.layers):
        return 0
    return length


def _rank(entry: StoredPrompt, length: int) -> tuple[int, int, int]:
    """More tokens; then rows chosen for just these tokens, which need no choosing any more,
    then exact rows; then less to trim."""
    fits = 2 if entry.compacted_at == length else int(entry.config is None)
    return length, fits, -len(entry.tokens)


def _replaces(entry: StoredPrompt, old: StoredPrompt) -> bool:
    if old.model != entry.model or old.config != entry.config:
        return False
    length = len(old.tokens)
    if length > len(entry.tokens) or not np.array_equal(entry.tokens[:length], old.tokens):
        return False
    if length == len(entry.tokens):
        return entry.compacted_at == old.compacted_at
    # Rows chosen later are no substitute for rows chosen earlier.
    same_rows = entry.compacted_at == old.compacted_at
    return same_rows and all(layer.is_trimmable() for layer in entry.layers)
