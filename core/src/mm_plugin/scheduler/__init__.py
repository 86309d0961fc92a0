"""What a scheduler calls: padding, accounting, a separate encoder part, lifetime of media, sessions. Needs no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
