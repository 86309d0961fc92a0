"""Digests, and the keys and identities that are made of them. Knows no media; docs/identity-and-caching.md has the byte format."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
