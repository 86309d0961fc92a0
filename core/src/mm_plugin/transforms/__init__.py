"""Model-neutral numerics over images and videos: resize, tiles, patches, normalization, frame sampling. Numbers are arguments."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
