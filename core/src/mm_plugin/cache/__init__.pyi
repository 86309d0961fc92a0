from .embedding import EmbeddingCache
from .encoded import Codec, EncodedStore
from .guarded import GuardedStore, guard_store
from .held import HeldEmbeddings
from .keys import embedding_key, encoder_key
from .memory import MemoryStore
from .single_flight import ComputeCache
from .store import ByteStore, Stats, Store
from .tiered import TieredStore

__all__ = [
    "ByteStore",
    "Codec",
    "ComputeCache",
    "EmbeddingCache",
    "EncodedStore",
    "GuardedStore",
    "HeldEmbeddings",
    "MemoryStore",
    "Stats",
    "Store",
    "TieredStore",
    "embedding_key",
    "encoder_key",
    "guard_store",
]
