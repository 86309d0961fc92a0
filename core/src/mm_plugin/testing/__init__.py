"""The author's kit: what the tests of a plugin build on. Knows no model; `testing.plugin_tests` needs pytest."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
