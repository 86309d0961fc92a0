"""Odd images, videos and audio inputs, generated when asked for, each with its expected result or error. Holds no files.

    for entry in corpus.images():
        corpus.check(entry)

`forms` yields each in every form in which it can be sent, `mutated` corrupts a file, and `sweep` feeds all of them to a plugin.
Expected pixels and samples are computed from what the file was made of, never by decoding it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
