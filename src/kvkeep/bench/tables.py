"""A report as tables of text, and as Markdown."""

from __future__ import annotations

from kvkeep.bench.machine import Device, ModelFacts
from kvkeep.bench.results import BenchReport, DecodeResult, PromptResult
from kvkeep.bench.rows import compaction_rows, decode_rows, prefill_rows
from kvkeep.bench.timing import Spread
from kvkeep.pages import TextTable, markdown_table, markdown_text

NOTHING = "–"
_MB = 1e6


def tables(report: BenchReport) -> list[TextTable]:
    """One table per result; two for a prompt that was read."""
    shown: list[TextTable] = []
    for result in report.results:
        if isinstance(result, DecodeResult):
            shown.append(decode_table(result))
        else:
            shown += prompt_tables(result)
    return shown


def decode_table(result: DecodeResult) -> TextTable:
    """Speed, ratios and memory of every contender."""
    rows = tuple(
        (
            row.run.name,
            f"{row.run.rows:,}",
            spread_words(row.speed, "{:,.1f}"),
            spread_words(row.against_exact, "{:.2f}"),
            spread_words(row.against_bound, "{:.2f}"),
            mb_words(row.run.live_nbytes),
            mb_words(row.run.allocated_nbytes),
            mb_words(row.run.peak_nbytes),
        )
        for row in decode_rows(result)
    )
    requests = "1 request" if result.batch == 1 else f"{result.batch} requests together"
    return TextTable(
        f"Decode, T {result.length:,}, {requests}",
        ("cache", "rows", "tok/s", "× exact", "× bound", "live MB", "buffers MB", "peak MB"),
        rows,
        f"{_rounds(result.rounds, f'of {result.tokens} steps')}; rows per KV head and request.",
    )


def prompt_tables(result: PromptResult) -> list[TextTable]:
    """What reading for eviction adds to a prefill, and what each setting takes after it."""
    shown = []
    read = prefill_rows(result)
    if read:
        rows = tuple(
            (
                row.name,
                spread_words(row.seconds, "{:.2f}"),
                spread_words(row.against_stock, "{:.3f}"),
                spread_words(row.after, "{:.3f}"),
                spread_words(row.share_after, "{:.1%}"),
                mb_words(row.peak_nbytes),
                NOTHING if row.peak_against_stock is None else f"{row.peak_against_stock:.3f}",
            )
            for row in read
        )
        shown.append(
            TextTable(
                f"Prefill, T {result.length:,}",
                (
                    "read for", "prefill s", "× stock", "score + compact s", "of prefill",
                    "peak MB", "× stock peak",
                ),
                rows,
                f"{_rounds(len(result.stock_seconds))}; chunks of {result.step:,} tokens. The peak"
                " of a policy is from prefill to compaction.",
            )
        )  # fmt: skip
    rows = tuple(
        (
            str(row.compaction.setting),
            row.compaction.stored,
            f"{row.compaction.rows:,}",
            spread_words(row.score, "{:.3f}"),
            spread_words(row.compact, "{:.2f}", 1000),
            mb_words(row.compaction.exact_nbytes),
            mb_words(row.compaction.compact_nbytes),
            f"{row.live_share:.2f}",
            mb_words(row.compaction.compact_allocated),
        )
        for row in compaction_rows(result)
    )
    shown.append(
        TextTable(
            f"Compaction, T {result.length:,}",
            (
                "setting", "stored", "rows", "score s", "compact ms", "exact live MB",
                "live MB", "of exact", "buffers MB",
            ),
            rows,
            f"{_rounds(result.rounds)}; rows per KV head (the mean).",
        )
    )  # fmt: skip
    return shown


def device_line(device: Device) -> str:
    """What figures were taken on, in a line."""
    cores = f"{device.cores} core" + ("s" if device.cores != 1 else "")
    versions = ", ".join(
        f"{name} {version}"
        for name, version in (
            ("kvkeep", device.kvkeep),
            ("mlx", device.mlx),
            ("mlx-lm", device.mlx_lm),
            ("Python", device.python),
        )
    )
    kind = f"{device.kind.upper()} {device.name}, {device.system}, {cores}"
    return f"{kind}, BLAS {device.blas}; {versions}"


def model_line(model: ModelFacts) -> str:
    """Which model, in a line."""
    shape = f" ({model.synthetic})" if model.synthetic else ""
    weights = f"{mb_words(model.weights_nbytes)} MB of weights"
    return f"{model.name}{shape}, K/V {model.dtype}, {weights}"


def warnings(report: BenchReport) -> list[str]:
    """What a reader must know before he trusts the figures."""
    busy = [f"{s.load_start:.1f}" for s in report.sessions if s.busy]
    if not (report.busy and busy):
        return []
    return [
        f"The machine was busy before the run (load {', '.join(busy)} on {report.device.cores}"
        " cores): times and ratios are less certain than they look."
    ]


def markdown(report: BenchReport) -> str:
    """The whole report in Markdown."""
    lines = ["# kvkeep bench", ""]
    for line in (device_line(report.device), model_line(report.model)):
        lines += [markdown_text(line), ""]
    for warning in warnings(report):
        lines += [f"**{warning}**", ""]
    for table in tables(report):
        lines += [f"## {table.title}", "", *markdown_table(table), "", table.note, ""]
    return "\n".join(lines).rstrip() + "\n"


def _rounds(count: int, what: str = "") -> str:
    """How many rounds, and what the brackets hold."""
    if count == 1:
        return f"1 round {what}".rstrip()
    sure = f"{100 * Spread.coverage(count):.0f} %"
    told = f"{count} rounds {what}".rstrip()
    return f"Medians of {told}, interleaved, and the interval that holds them with {sure} certainty"


def spread_words(spread: Spread | None, form: str, factor: float = 1) -> str:
    """A median, and in brackets its interval where there is one."""
    if spread is None:
        return NOTHING
    middle, low, high = (
        form.format(factor * figure)
        for figure in (spread.median, spread.median_low, spread.median_high)
    )
    return middle if low == middle == high else f"{middle} ({low} – {high})"


def mb_words(amount: float) -> str:
    """Megabytes (decimal), without the unit."""
    return f"{amount / _MB:,.1f}" if amount >= _MB else f"{amount / _MB:.3f}"
