"""Untrusted bytes, paths, URLs, arrays, PIL objects, frames and samples -> decoded media, within every limit."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
