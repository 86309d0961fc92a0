"""`Encoder` and its mixins, which an author subclasses to turn items into embeddings, and what encoders share."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
