"""Odd pictures, clips and sounds, made on the spot, each with its right answer or its right error. Holds no files.

    for specimen in zoo.images():
        zoo.check(specimen)

`forms` gives each in every form in which it may be sent, `mutated` harms a file, and `sweep` feeds all of them to a plugin.
Expected pixels and samples are arithmetic on what the file was made from; nothing is read back to know them.
"""

from __future__ import annotations

from mm_plugin.testing.zoo.clips import clips
from mm_plugin.testing.zoo.images import images
from mm_plugin.testing.zoo.sounds import sounds
from mm_plugin.testing.zoo.specimens import Clip, Picture, Sound, Specimen, check, forms, mutated, read
from mm_plugin.testing.zoo.sweep import sweep

__all__ = [
    "Clip",
    "Picture",
    "Sound",
    "Specimen",
    "check",
    "clips",
    "forms",
    "images",
    "mutated",
    "read",
    "sounds",
    "sweep",
]
