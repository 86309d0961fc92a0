from .embedding import EmbeddingCache
from .encoded import Codec, EncodedStore
from .guarded import GuardedStore, guard_store
from .held import HeldEmbeddings
from .keys import ITEM_KEY_BYTES, embedding_key, encoder_key, item_key
from .memory import MemoryStore
from .single_flight import ComputeCache
from .store import ByteStore, Stats, Store
from .tiered import TieredStore

__all__ = [
    "ITEM_KEY_BYTES",
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
    "item_key",
]
