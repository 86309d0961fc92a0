from .audio_entries import audios
from .entries import CorpusEntry, ExpectedAudio, ExpectedImage, ExpectedVideo, check, forms, mutated, read
from .image_entries import images
from .plugin_sweep import sweep
from .video_entries import videos

__all__ = [
    "CorpusEntry",
    "ExpectedAudio",
    "ExpectedImage",
    "ExpectedVideo",
    "audios",
    "check",
    "forms",
    "images",
    "mutated",
    "read",
    "sweep",
    "videos",
]
