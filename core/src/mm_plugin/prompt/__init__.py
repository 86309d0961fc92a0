"""Text, ids and chat messages -> token ids with slots; client text stays text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
