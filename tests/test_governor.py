"""The memory governor by itself, and the sizes that its flag takes."""

from __future__ import annotations

import pytest

from kvkeep.reuse import PromptStore
from kvkeep.server import memory_bytes
from kvkeep.server.current import Plan
from kvkeep.server.governor import MemoryGovernor, Need
from kvkeep.server.settings import KvRequest


def test_the_batch_is_padded_to_its_longest() -> None:
    class Fixed:
        def __init__(self, prompt: int, decode: int) -> None:
            self.fixed = Need(prompt, decode)

        def need(self, _: Plan) -> Need:
            return self.fixed

    governor = MemoryGovernor(100, PromptStore())
    plans = [Plan(KvRequest(), [1]) for _ in range(4)]
    assert governor.admit(plans[0], Fixed(40, 10))  # type: ignore[arg-type]
    assert governor.reserved == 40
    assert governor.admit(plans[1], Fixed(20, 15))  # type: ignore[arg-type]
    assert governor.reserved == 2 * 40  # the shorter is padded to the longer
    assert not governor.admit(plans[2], Fixed(20, 15))  # type: ignore[arg-type]
    governor.answering(plans[0])
    assert governor.reserved == 20 + 15
    assert governor.admit(plans[2], Fixed(40, 15))  # type: ignore[arg-type]
    assert governor.reserved == 2 * 40 + 15
    for plan in plans[:3]:
        governor.release(plan)
    assert governor.reserved == 0
    plans[3].kv.ended = True
    assert governor.admit(plans[3], Fixed(90, 15))  # type: ignore[arg-type]
    assert governor.admit(plans[2], Fixed(90, 15))  # type: ignore[arg-type]  # the other is gone


def test_sizes() -> None:
    assert memory_bytes("8GB") == 8 * 10**9
    assert memory_bytes("512MiB") == 512 * 2**20
    assert 2**30 < memory_bytes("50%") < memory_bytes("100%")
    for bad in ("12", "-1GB", "0%", "lots", "8 GX"):
        with pytest.raises(Exception, match="kv-memory"):
            memory_bytes(bad)
