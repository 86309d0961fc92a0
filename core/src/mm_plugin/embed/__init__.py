"""Interval arithmetic, batch encoding, and embeddings written into text embeddings. Runs in the GPU worker; knows no model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
