"""Text, ids and chat messages -> token ids with slots for media; a client's text stays text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
