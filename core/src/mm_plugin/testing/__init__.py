"""The author's kit: what a plugin's own tests build on. Knows no model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
