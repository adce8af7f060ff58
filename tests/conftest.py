"""Fixtures that every test module shares."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Read when huggingface_hub is imported. Tests load local folders: asking a hub fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Before any test module imports mlx: on a Linux CPU a fast BLAS only counts if it comes first.
import hypothesis
import numpy as np
import pytest

import kvkeep  # noqa: F401
from browser import browser, open_page  # noqa: F401  # fixtures of every module

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# How long one example takes says more about the machine than about the code.
hypothesis.settings.register_profile("kvkeep", deadline=None)
hypothesis.settings.load_profile("kvkeep")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in every test, whatever ran before it."""
    import mlx.core as mx

    mx.random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def demo_model() -> tuple[nn.Module, TokenizerWrapper]:
    """The real demo model and its tokenizer, loaded once; fetched on the first use ever."""
    import mlx_lm

    from kvkeep.demo_model import resolve_model

    model, tokenizer = mlx_lm.load(str(resolve_model("demo")))[:2]
    return model, tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that takes the fixture `demo_model` or `browser` gets the mark of that name."""
    for item in items:
        for name in ("demo_model", "browser"):
            if name in getattr(item, "fixturenames", ()):
                item.add_marker(name)
