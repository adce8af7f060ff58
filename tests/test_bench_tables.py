"""A made-up report as Markdown, letter by letter."""

from __future__ import annotations

import dataclasses

from bench_reports import a_decode, a_device, a_model, a_prompt, a_report
from kvkeep.bench import markdown, tables, warnings

GOLDEN = """\
# kvkeep bench

CPU Some CPU, Linux x86_64, 2 cores, BLAS MKL (loaded); kvkeep 0.1.0, mlx 0.32.4, mlx-lm 0.32.2, Python 3.12.1

demo, K/V float32, 538.0 MB of weights

## Prefill, T 2,048

| read for | prefill s | × stock | score + compact s | of prefill | peak MB | × stock peak |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| stock | 20.00 (10.00 – 30.00) | – | – | – | 900.0 | – |
| span | 20.00 (11.00 – 33.00) | 1.100 (1.000 – 1.100) | 2.000 (1.100 – 3.300) | 10.0% | 910.0 | 1.011 |

Medians of 3 rounds, interleaved, and the interval that holds them with 75 % certainty; chunks of 512 tokens. The peak of a policy is from prefill to compaction.

## Compaction, T 2,048

| setting | stored | rows | score s | compact ms | exact live MB | live MB | of exact | buffers MB |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| span 25%, auto | per-head | 512 | 0.500 (0.250 – 1.000) | 2.00 (1.00 – 4.00) | 94.0 | 23.5 | 0.25 | 24.0 |
| snapkv 512, adaptive, ragged | ragged | 512 | 0.500 (0.250 – 1.000) | 2.00 (1.00 – 4.00) | 94.0 | 23.5 | 0.25 | 24.0 |

Medians of 3 rounds, interleaved, and the interval that holds them with 75 % certainty; rows per KV head (the mean).

## Decode, T 2,048, 2 requests together

| cache | rows | tok/s | × exact | × bound | live MB | buffers MB | peak MB |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| exact | 2,048 | 4.0 (2.0 – 8.0) | – | – | 2.0 | 2.0 | 10.0 |
| bound: stock cache of 512 rows | 512 | 16.0 | 4.00 (2.00 – 8.00) | – | 0.512 | 0.512 | 10.0 |
| span 25%, auto | 512 | 10.0 (8.0 – 16.0) | 2.00 (2.00 – 5.00) | 0.62 (0.50 – 1.00) | 0.512 | 0.512 | 10.0 |
| snapkv 512, adaptive, ragged | 512 | 8.0 (4.0 – 16.0) | 2.00 (1.00 – 4.00) | 0.50 (0.25 – 1.00) | 0.512 | 0.512 | 10.0 |

Medians of 3 rounds of 8 steps, interleaved, and the interval that holds them with 75 % certainty; rows per KV head and request.
"""  # noqa: E501


def test_markdown_letter_by_letter() -> None:
    assert markdown(a_report()) == GOLDEN


def test_tables_are_rectangles() -> None:
    shown = tables(a_report(a_prompt(), a_prompt(read=False), a_decode(), a_decode(batch=1)))
    assert [table.title.partition(",")[0] for table in shown] == [
        "Prefill", "Compaction", "Compaction", "Decode", "Decode",
    ]  # fmt: skip
    for table in shown:
        assert {len(row) for row in table.rows} == {len(table.headers)}
    assert shown[-1].title == "Decode, T 2,048, 1 request"


def test_one_round_claims_no_interval() -> None:
    runs = tuple(dataclasses.replace(run, seconds=run.seconds[:1]) for run in a_decode().runs)
    (table,) = tables(a_report(dataclasses.replace(a_decode(), runs=runs)))
    assert table.note.startswith("1 round of 8 steps;")
    assert "(" not in "".join("".join(row) for row in table.rows)


def test_a_busy_machine_is_said_to_be_one() -> None:
    assert warnings(a_report(load=1.0)) == []  # half of two cores
    (warning,) = warnings(a_report(load=1.2))
    assert "load 1.2 on 2 cores" in warning
    assert f"**{warning}**" in markdown(a_report(load=1.2))
    idle = dataclasses.replace(a_report(load=1.2), results=())
    assert warnings(idle) == []  # no figure comes from that session


def test_names_are_told_where_they_matter() -> None:
    gpu = a_device(kind="gpu", name="M | 4", cores=1)
    report = dataclasses.replace(a_report(), device=gpu, model=a_model(synthetic="layers=4"))
    text = markdown(report)
    assert "GPU M | 4, Linux x86_64, 1 core, " in text
    assert "demo (layers=4), K/V float32" in text
