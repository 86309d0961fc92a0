"""mm-plugin: a plugin framework for model-specific multimodal processors.

`discover()` reads what is installed; a `Registry` opens processors and encoders. Importing this package imports neither torch nor
transformers nor numpy: every name of `__init__.pyi`, the public face, is loaded when it is first used.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
