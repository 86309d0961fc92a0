from .audio_entries import sounds
from .entries import Clip, Picture, Sound, Specimen, check, forms, mutated, read
from .image_entries import images
from .plugin_sweep import sweep
from .video_entries import clips

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
