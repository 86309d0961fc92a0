"""Odd images, videos and audio inputs, made on the spot, each with its right answer or its right error. Holds no files.

    for entry in corpus.images():
        corpus.check(entry)

`forms` gives each in every form in which it may be sent, `mutated` harms a file, and `sweep` feeds all of them to a plugin.
Expected pixels and samples are arithmetic on what the file was made from; nothing is read back to know them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
