"""Shared tests of models over patch grids, with transformers' Qwen2-VL interface as the reference."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
