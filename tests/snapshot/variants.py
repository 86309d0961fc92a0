"""Which models are opened, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from snapshot.framework import family_slot

ALL = ("",)
SOME = ("image", "background/", "aspect/", "count/", "prepared ", "2 items", "item/", "mixed/", "video", "frames/")


class Variant(NamedTuple):
    """One way to open one tiny checkpoint.

    Attributes:
        plugin: which serves it.
        slots: how an item of each modality stands in a prompt.
        load: options given when it is opened.
        make: arguments with which the checkpoint is made.
        stride: every how many entries of the corpus one is part of every test run; 0 for a variant with requests alone.
        requests: how the names of the requests of `cases` begin that are made.
    """

    plugin: str
    slots: Mapping[str, str]
    load: Mapping[str, Any] = {}
    make: Mapping[str, Any] = {}
    stride: int = 4
    requests: tuple[str, ...] = ()


_QWEN = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_DEEPSEEK = {"image": "<image>"}


def _fallback(
    family: str, load: Mapping[str, Any] | None = None, *, stride: int = 4, requests: tuple[str, ...] = ALL
) -> Variant:
    return Variant(
        "transformers_auto", family_slot(family), load or {}, {"family": family}, stride=stride, requests=requests
    )


VARIANTS: Mapping[str, Variant] = {
    "qwen2_vl": Variant("qwen2_vl", _QWEN, stride=1, requests=ALL),
    "qwen2_vl pillow float32": Variant("qwen2_vl", _QWEN, {"resize": "pillow", "feature_format": "float32"}),
    "qwen2_vl rules of transformers": Variant(
        "qwen2_vl",
        _QWEN,
        {"frame_rule": "transformers", "frame_size_rule": "transformers", "min_pixels": 10_000, "max_pixels": 40_000},
        stride=0,
        requests=SOME,
    ),
    "qwen2_5_vl": Variant("qwen2_5_vl", _QWEN, stride=2, requests=ALL),
    "qwen2_5_vl torch float32": Variant("qwen2_5_vl", _QWEN, {"resize": "torch", "feature_format": "float32"}),
    "qwen2_5_vl combined settings": Variant(
        "qwen2_5_vl",
        _QWEN,
        {"background": (0, 128, 255)},
        {"combined": True, "preprocessor": {"min_pixels": 6272, "max_pixels": 100_352}},
        stride=0,
        requests=SOME,
    ),
    "deepseek_vl2": Variant("deepseek_vl2", _DEEPSEEK, stride=2, requests=ALL),
    "deepseek_vl2 torch": Variant("deepseek_vl2", _DEEPSEEK, {"resize": "torch"}, stride=0, requests=SOME),
    "deepseek_vl2 float32": Variant("deepseek_vl2", _DEEPSEEK, {"feature_format": "float32"}, stride=8, requests=SOME),
    "llava": _fallback("llava"),
    "llava narrow": _fallback("llava", {"max_aspect_ratio": 2.0, "background": (10, 20, 30)}, stride=0, requests=SOME),
    "llava_next": _fallback("llava_next", stride=16, requests=SOME),
    "gemma3": _fallback("gemma3"),
    "idefics3": _fallback("idefics3", stride=8),
    "aya_vision": _fallback("aya_vision", stride=0),
    "paligemma": _fallback("paligemma"),
    "idefics2": _fallback("idefics2"),
    "qwen2_audio": _fallback("qwen2_audio", stride=2),
    "audioflamingo3": _fallback("audioflamingo3", stride=2),
}
