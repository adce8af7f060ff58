"""The tables that commands end with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.comparing import Answer, Comparison
from kvkeep.pages import nbytes
from kvkeep.spec import EvictionConfig, SnapKVEvictionResult


@dataclass(frozen=True)
class Run:
    """Figures of one answer.

    Attributes:
        prompt_tokens: tokens that were read for it.
        cached_tokens: tokens that a saved cache held before them.
        prefill_seconds: reading them.
        generated: tokens of the answer.
        decode_tps: tokens per second.
        peak_memory: bytes.
        kv_nbytes: live K/V bytes where nothing was evicted.
        kv: the compaction's figures, or None where eviction was off.
    """

    prompt_tokens: int
    cached_tokens: int
    prefill_seconds: float
    generated: int
    decode_tps: float
    peak_memory: float
    kv_nbytes: int
    kv: SnapKVEvictionResult | None


def run_table(run: Run) -> Table:
    """Figures of one answer, a line each."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    cached = f" after {run.cached_tokens:,} in the saved cache" if run.cached_tokens else ""
    table.add_row("prompt", f"{run.prompt_tokens:,} tokens{cached}")
    if run.kv is None:
        table.add_row("rows kept", "all (eviction is off)")
        table.add_row("KV cache", nbytes(run.kv_nbytes))
    else:
        table.add_row("rows kept", rows_kept(run.kv))
        table.add_row("KV cache", before_and_after(run.kv))
    speed = run.prompt_tokens / max(run.prefill_seconds, 1e-9)
    table.add_row("prefill", f"{seconds(run.prefill_seconds)} ({speed:,.1f} tok/s)")
    if run.kv is not None:
        table.add_row("score", seconds(run.kv.times.score))
        table.add_row("compact", seconds(run.kv.times.compact))
    decode = run.generated / max(run.decode_tps, 1e-9)
    table.add_row(
        "decode", f"{seconds(decode)} ({run.decode_tps:,.1f} tok/s, {run.generated:,} tokens)"
    )
    table.add_row("peak memory", nbytes(run.peak_memory))
    return table


def comparison_table(comparison: Comparison, config: EvictionConfig) -> Table:
    """Both answers side by side, and what each cost."""
    exact, evicted, kv = comparison.exact, comparison.evicted, comparison.kv
    table = Table(show_lines=False, expand=False)
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("exact", ratio=1)
    table.add_column(f"{config.policy}, {config.limit}", ratio=1)
    table.add_column("ratio", justify="right", no_wrap=True)

    def row(name: str, shown: Sequence[str], values: Sequence[float | None]) -> None:
        table.add_row(name, *shown, _ratio(values[1], values[0]))

    table.add_row("answer", _answer_text(exact), _answer_text(evicted), "")
    table.add_section()
    row("rows per KV head", [f"{a.rows:,}" for a in (exact, evicted)], [exact.rows, evicted.rows])
    for name, field in (("KV live", "live_nbytes"), ("KV allocated", "allocated_nbytes")):
        sizes = [getattr(answer, field) for answer in (exact, evicted)]
        row(name, [nbytes(size) for size in sizes], sizes)
    speeds = [exact.decode_tps, evicted.decode_tps]
    row("decode", [_speed(answer) for answer in (exact, evicted)], speeds)
    times = kv.times
    table.caption = (
        f"{comparison.prompt_tokens:,} prompt tokens, read once in {seconds(times.prefill)};"
        f" score {seconds(times.score)}, compact {seconds(times.compact)};"
        f" peak memory {nbytes(comparison.peak_memory)}"
    )
    table.caption_justify = "left"
    return table


def print_table(table: Table) -> None:
    """Print a table on stdout."""
    Console(highlight=False).print(table)


def rows_kept(kv: SnapKVEvictionResult) -> str:
    """Rows per KV head and their share, in words."""
    total = kv.original_tokens
    if not kv.evicted:
        return f"all {total:,} (within the budget, or at most --kv-min-tokens)"
    share = 100 * kv.retained_tokens / total
    return f"{kv.retained_tokens:,} of {total:,} per KV head ({share:.1f}%)"


def before_and_after(kv: SnapKVEvictionResult) -> str:
    """Bytes of the live K/V rows before and after eviction."""
    before, after = kv.exact_cache_nbytes, kv.compact_cache_nbytes
    return f"{nbytes(before)} before, {nbytes(after)} after ({100 * after / before:.1f}%)"


def seconds(time: float) -> str:
    """A duration as a person reads it."""
    return f"{1000 * time:.1f} ms" if time < 0.1 else f"{time:.2f} s"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value is not None and base else "–"


def _speed(answer: Answer) -> str:
    speed = answer.decode_tps
    return f"{len(answer.tokens)} token" if speed is None else f"{speed:,.1f} tok/s"


def _answer_text(answer: Answer) -> Text:
    text = Text(answer.text.strip() or "(nothing)")
    if answer.finish_reason == "length":
        text.append(" …", style="dim")
    return text
