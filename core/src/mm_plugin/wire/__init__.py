"""Requests, items, tasks and embeddings as frames of bytes that cross processes and machines, without pickle. See `wire.frames`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
