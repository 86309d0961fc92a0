"""What travels of a request, and what the scheduler and the GPU worker each keep of it. Imports no torch; knows no model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
