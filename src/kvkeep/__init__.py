"""kvkeep: evict the KV-cache rows that are hardly read again, decode against the rest."""

from kvkeep import blas

blas.load()  # before anything imports mlx: it takes effect only then

from kvkeep.allocation import pyramid_budgets  # noqa: E402
from kvkeep.attention import SnapKVAttentionCapture  # noqa: E402
from kvkeep.by_head import evict_prompt_cache_by_head  # noqa: E402
from kvkeep.caches import (  # noqa: E402
    BatchMixedKVCache,
    BatchPositionPreservingKVCache,
    HeadPartitionedKVCache,
    PositionPreservingKVCache,
    PositionPreservingQuantizedKVCache,
    RaggedKVCache,
)
from kvkeep.compaction import (  # noqa: E402
    compact_prompt_cache,
    evict_prompt_cache,
    evict_selection,
)
from kvkeep.comparing import compare  # noqa: E402
from kvkeep.conversation import Conversation  # noqa: E402
from kvkeep.errors import KvkeepError  # noqa: E402
from kvkeep.generation import RECOMMENDED, generate, stream_generate  # noqa: E402
from kvkeep.heads import ProfileSettings, profile_heads  # noqa: E402
from kvkeep.inspecting import Inspection, inspect_prompt  # noqa: E402
from kvkeep.policies import get_policy  # noqa: E402
from kvkeep.reuse import (  # noqa: E402
    load_prompt_cache,
    register_caches,
    save_prompt_cache,
)
from kvkeep.selection import (  # noqa: E402
    random_indices,
    sink_recent_indices,
    snapkv_keep_indices,
    topk_indices_per_head,
)
from kvkeep.spec import (  # noqa: E402
    Budget,
    EvictionConfig,
    HeadPartitionedEvictionResult,
    HeadProfile,
    LayerSelection,
    LayerView,
    Selection,
    SnapKVEvictionResult,
    load_head_profile,
)
from kvkeep.suite import (  # noqa: E402
    SelectionInfo,
    attention_window_scores,
    copy_cache,
    dense_kv,
    select_cache,
    select_positions,
)

__version__ = "0.1.0"

register_caches()

__all__ = [
    "RECOMMENDED",
    "BatchMixedKVCache",
    "BatchPositionPreservingKVCache",
    "Budget",
    "Conversation",
    "EvictionConfig",
    "HeadPartitionedEvictionResult",
    "HeadPartitionedKVCache",
    "HeadProfile",
    "Inspection",
    "KvkeepError",
    "LayerSelection",
    "LayerView",
    "PositionPreservingKVCache",
    "PositionPreservingQuantizedKVCache",
    "ProfileSettings",
    "RaggedKVCache",
    "Selection",
    "SelectionInfo",
    "SnapKVAttentionCapture",
    "SnapKVEvictionResult",
    "attention_window_scores",
    "compact_prompt_cache",
    "compare",
    "copy_cache",
    "dense_kv",
    "evict_prompt_cache",
    "evict_prompt_cache_by_head",
    "evict_selection",
    "generate",
    "get_policy",
    "inspect_prompt",
    "load_head_profile",
    "load_prompt_cache",
    "profile_heads",
    "pyramid_budgets",
    "random_indices",
    "save_prompt_cache",
    "select_cache",
    "select_positions",
    "sink_recent_indices",
    "snapkv_keep_indices",
    "stream_generate",
    "topk_indices_per_head",
]
