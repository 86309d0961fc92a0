"""`ModelProcessor`, which an author subclasses, and the way from prompt and media to processor output."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
