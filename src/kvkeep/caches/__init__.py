"""Caches that hold part of the rows and keep mlx-lm's whole cache contract."""

from kvkeep.caches.base import CompactCache
from kvkeep.caches.batch import BatchPositionPreservingKVCache
from kvkeep.caches.compact import PositionPreservingKVCache
from kvkeep.caches.groups import RowGroup
from kvkeep.caches.handed import RowsForAttentionOnly
from kvkeep.caches.leaves import leaves_of, replace_leaves
from kvkeep.caches.masks import is_own_mask, is_window_mask
from kvkeep.caches.mixed import BatchMixedKVCache
from kvkeep.caches.mixing import accept_compact_in_stock_batches
from kvkeep.caches.partitioned import HeadPartitionedKVCache
from kvkeep.caches.protocol import OwnsAttention, on_seam_needed, request_seam
from kvkeep.caches.quantized import PositionPreservingQuantizedKVCache
from kvkeep.caches.ragged import RaggedKVCache
from kvkeep.caches.retain import (
    allocated_nbytes,
    bytes_per_row,
    is_compact,
    is_exact,
    is_plain,
    layer_positions,
    layer_rows,
    live_nbytes,
    require_evictable,
    require_one_request,
    retained,
    row_groups,
    with_siblings,
)

__all__ = [
    "BatchMixedKVCache",
    "BatchPositionPreservingKVCache",
    "CompactCache",
    "HeadPartitionedKVCache",
    "OwnsAttention",
    "PositionPreservingKVCache",
    "PositionPreservingQuantizedKVCache",
    "RaggedKVCache",
    "RowGroup",
    "RowsForAttentionOnly",
    "accept_compact_in_stock_batches",
    "allocated_nbytes",
    "bytes_per_row",
    "is_compact",
    "is_exact",
    "is_own_mask",
    "is_plain",
    "is_window_mask",
    "layer_positions",
    "layer_rows",
    "leaves_of",
    "live_nbytes",
    "on_seam_needed",
    "replace_leaves",
    "request_seam",
    "require_evictable",
    "require_one_request",
    "retained",
    "row_groups",
    "with_siblings",
]
