from .embedding import EmbeddingCache
from .guarded import GuardedStore, guard_store
from .memory import MemoryStore
from .single_flight import ComputeCache
from .store import Stats, Store

__all__ = [
    "ComputeCache",
    "EmbeddingCache",
    "GuardedStore",
    "MemoryStore",
    "Stats",
    "Store",
    "guard_store",
]
