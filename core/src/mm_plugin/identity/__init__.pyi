from .digests import DigestFunction, Digests, digest, test_vectors
from .framing import FORMAT_VERSION, feature_digest, feature_digests, frame
from .keys import caller_identity, deferred_identity, item_identity, parse_caller_hash, parse_caller_name, source_key

__all__ = [
    "FORMAT_VERSION",
    "DigestFunction",
    "Digests",
    "caller_identity",
    "deferred_identity",
    "digest",
    "feature_digest",
    "feature_digests",
    "frame",
    "item_identity",
    "parse_caller_hash",
    "parse_caller_name",
    "source_key",
    "test_vectors",
]
