"""How many rows each layer and head gets: one file per rule, pure."""

from kvkeep.allocation.adaptive import Adaptive, Global, competing_counts, scaled
from kvkeep.allocation.apportion import apportion
from kvkeep.allocation.base import Allocation, Demand, Scored
from kvkeep.allocation.duo import Duo
from kvkeep.allocation.grouping import grouped_counts
from kvkeep.allocation.pyramid import pyramid_budgets, pyramid_kvpress_budgets
from kvkeep.allocation.registry import (
    ALLOCATION_OPTIONS,
    ALLOCATIONS,
    allocation_of,
    get_allocation,
)

__all__ = [
    "ALLOCATIONS",
    "ALLOCATION_OPTIONS",
    "Adaptive",
    "Allocation",
    "Demand",
    "Duo",
    "Global",
    "Scored",
    "allocation_of",
    "apportion",
    "competing_counts",
    "get_allocation",
    "grouped_counts",
    "pyramid_budgets",
    "pyramid_kvpress_budgets",
    "scaled",
]
