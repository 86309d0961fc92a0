"""Pytest classes that a plugin's tests subclass. Needs pytest and hypothesis, which nothing else in the package imports."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
