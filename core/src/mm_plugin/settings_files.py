"""Where the preprocessing settings of a checkpoint stand, and what they say. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_plugin.checkpoint_files import read_json
from mm_plugin.errors import UsageError
from mm_plugin.items import Modality

_COMBINED = "processor_config.json"
_PARTS = {Modality.IMAGE: "image_processor", Modality.VIDEO: "video_processor", Modality.AUDIO: "feature_extractor"}
_FILES = {
    Modality.IMAGE: ("preprocessor_config.json",),
    Modality.VIDEO: ("video_preprocessor_config.json", "preprocessor_config.json"),
    Modality.AUDIO: ("preprocessor_config.json",),
}
# Every file that may have some.
SETTINGS_FILES = sorted({_COMBINED, *(name for group in _FILES.values() for name in group)})
# Keys of `size`, and the limits that they are; the second pair stands in files of older versions of transformers.
PIXEL_EDGES = (
    ("shortest_edge", "min_pixels"),
    ("longest_edge", "max_pixels"),
    ("min_pixels", "min_pixels"),
    ("max_pixels", "max_pixels"),
)


def find_settings(folder: Path, modality: Modality) -> tuple[str, dict[str, Any]]:
    """The preprocessing settings of a modality; see `Checkpoint.preprocessor`.

    Args:
        folder: the checkpoint's.
        modality: the modality whose settings are read.

    Returns:
        The file, with the section of it where it has some, and the settings in it, with `min_pixels` and `max_pixels`.

    Raises:
        UsageError: no file has such settings, or a file cannot be read.
    """
    combined = folder / _COMBINED
    if combined.is_file():
        parts = read_json(combined)
        section = _PARTS[modality]
        if modality is Modality.VIDEO and parts.get(section) is None:
            section = _PARTS[Modality.IMAGE]
        if isinstance(parts.get(section), dict):
            return f"{combined}: {section}", _with_pixel_limits(parts[section])
    for name in _FILES[modality]:
        if (folder / name).is_file():
            return str(folder / name), _with_pixel_limits(read_json(folder / name))
    raise UsageError(
        f"{folder}: expected preprocessing settings for {modality.argument} in {' or '.join(_FILES[modality])}, "
        f"or as {_PARTS[modality]!r} in {_COMBINED}, found none; copy the file from the released checkpoint",
        argument="checkpoint",
    )


def _with_pixel_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(settings)
    size = out.get("size")
    if isinstance(size, Mapping):
        for edge, limit in PIXEL_EDGES:
            if size.get(edge) is not None and out.get(limit) is None:
                out[limit] = size[edge]
    return out
