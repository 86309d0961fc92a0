"""Models that see images and videos as grids of merged patches, at a resolution near their own."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
