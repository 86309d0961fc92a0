"""Which plugins are installed, which of them serves a model, and how a model is opened. The only importer of plugins."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
