"""An OpenAI-compatible server: mlx_lm.server with eviction under continuous batching."""

from kvkeep.server.memory import memory_bytes
from kvkeep.server.serving import serve
from kvkeep.server.settings import KvRequest, ServerSettings, parse_kv

__all__ = ["KvRequest", "ServerSettings", "memory_bytes", "parse_kv", "serve"]
