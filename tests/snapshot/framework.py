"""Every name of the framework that the snapshot uses. When something is renamed, this is the one file to change."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mm_plugin_deepseekvl2.testing
import mm_plugin_qwen2vl.testing
import mm_plugin_qwen25vl.testing
import mm_plugin_transformers_auto.testing
from mm_plugin import (
    AudioSamples,
    AudioSize,
    MMPluginError,
    PrecomputedEmbeddings,
    ProcessorOutput,
    SampledVideo,
    Settings,
    VideoFrames,
    VideoSize,
    discover,
)
from mm_plugin.demo import sample_images
from mm_plugin.identity import feature_digest
from mm_plugin.media import probe
from mm_plugin.testing import corpus as media_corpus

__all__ = [
    "MAKERS",
    "AudioSamples",
    "AudioSize",
    "MMPluginError",
    "PrecomputedEmbeddings",
    "ProcessorOutput",
    "SampledVideo",
    "VideoFrames",
    "VideoSize",
    "corpus",
    "discover",
    "family_slot",
    "feature_digest",
    "is_output",
    "is_prepared_item",
    "probe",
    "sample_images",
    "settings",
]

# Writes a tiny checkpoint into a folder, by the plugin's name.
MAKERS = {
    "qwen2_vl": mm_plugin_qwen2vl.testing.make_checkpoint,
    "qwen2_5_vl": mm_plugin_qwen25vl.testing.make_checkpoint,
    "deepseek_vl2": mm_plugin_deepseekvl2.testing.make_checkpoint,
    "transformers_auto": mm_plugin_transformers_auto.testing.make_checkpoint,
}


def settings(media_root: Path) -> Settings:
    """The default limits, with a folder below which media may be read."""
    return Settings(threads=2, media_root=str(media_root))


def family_slot(family: str) -> dict[str, str]:
    """How an item of each modality stands in a prompt of one of the fallback's families."""
    known = mm_plugin_transformers_auto.testing.FAMILIES[family]
    return {name: text for name, text in (("image", known.image), ("audio", known.audio)) if text}


@functools.cache
def corpus() -> Mapping[str, tuple[tuple[str, Any], ...]]:
    """The odd media, by modality: (name, value), in an order that is part of the snapshot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        families = {"image": media_corpus.images(), "video": media_corpus.videos(), "audio": media_corpus.audios()}
        return {modality: tuple((entry.name, entry.value) for entry in found) for modality, found in families.items()}


def is_output(value: Any) -> bool:
    """Whether it is what `process` returns."""
    return hasattr(value, "padded_input_ids")


def is_prepared_item(value: Any) -> bool:
    """Whether it is what `prepare_item` returns."""
    return hasattr(value, "source_key")
