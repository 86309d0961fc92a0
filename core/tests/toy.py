"""The toy model of the core's tests: a processor for every modality, its spec, a checkpoint in memory, and media inputs.

A test that needs a model with a property of its own subclasses `Toy` and overrides that alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mm_plugin.items import Modality
from mm_plugin.media import AudioSamples, DecodedMedia, Sampling, VideoSize, whole
from mm_plugin.placeholders import Replacement
from mm_plugin.processor import AcceptsAudio, AcceptsVideos, BaseOptions, ModelProcessor, OptionScope
from mm_plugin.spec import ModelSpec

TOKENS = {Modality.IMAGE: "<image>", Modality.VIDEO: "<video>", Modality.AUDIO: "<audio>"}
RATE = 16


class ToyOptions(BaseOptions, frozen=True, kw_only=True):
    """`tone` changes images, `pitch` changes audio alone."""

    tone: Annotated[int, msgspec.Meta(ge=0, le=255), OptionScope.request("image")] = 0
    pitch: Annotated[int, OptionScope.request("audio")] = 0


class Toy(AcceptsVideos, AcceptsAudio, ModelProcessor):
    """A token for each row of pixels, each frame of a video, each sample.

    Where there are more than two images, each takes `crowded` tokens.
    """

    Options: ClassVar[type[BaseOptions]] = ToyOptions
    crowded = 1

    def context(self, counts: Mapping[Modality, int]) -> Any:
        return counts.get(Modality.IMAGE, 0) > 2

    def sample(self, size: VideoSize, options: Any) -> Sampling:
        return whole(size)

    def sampling_rate(self, options: Any) -> int:
        return RATE

    def rows(self, modality: Modality, size: Any, options: Any, context: Any) -> int:
        if context and modality is Modality.IMAGE:
            return self.crowded
        name = {Modality.IMAGE: "height", Modality.VIDEO: "frames", Modality.AUDIO: "num_samples"}[modality]
        return int(getattr(size, name))

    def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> dict[str, Any]:
        return {"rows": self.rows(modality, size, options, context), "kind": int(modality)}

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Any) -> Any:
        if decoded.modality is Modality.AUDIO:
            return decoded.samples + options.pitch
        pixels = decoded.pixels if decoded.modality is Modality.IMAGE else np.stack(list(decoded.frames))
        return pixels.astype(np.int16) + options.tone

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        return Replacement.repeat(self.special_tokens.placeholders[Modality(layout["kind"])], layout["rows"])


class PlainToy(Toy):
    """The same whatever else is in the request."""

    def context(self, counts: Mapping[Modality, int]) -> Any:
        return None


def toy_spec(*modalities: Modality, **declared: Any) -> ModelSpec:
    """The spec of a toy for these modalities, images alone where none is named; every field can be declared otherwise."""
    modalities = modalities or (Modality.IMAGE,)
    name = declared.get("name", "toy")
    usual: dict[str, Any] = {
        "name": name,
        "output_version": 1,
        "modalities": modalities,
        "placeholders": {modality: TOKENS[modality] for modality in modalities},
        "fields": dict.fromkeys(modalities, ("rows", "kind")),
        "padding": "runs",
        "processor": f"{name}:Processor",
        "encoder": f"{name}:Encoder",
    }
    return ModelSpec(**usual | declared)


def word_tokenizer(
    special: Iterable[str], words: Sequence[str] = ("word",), **arguments: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: `?` is 0, the words follow from 1 on, and after them the special tokens."""
    vocabulary = {word: index for index, word in enumerate(("?", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", **arguments)


class ToyCheckpoint:
    """What a processor reads of a checkpoint."""

    folder = Path("nowhere")

    def __init__(
        self, tokenizer: Any, settings: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer, self.settings = tokenizer, settings or {}
        self.config = {"vocab_size": 9} if config is None else config

    def preprocessor(self, modality: Modality) -> Mapping[str, Any]:
        return self.settings

    def preprocessor_source(self, modality: Modality) -> str:
        return "nowhere/preprocessor_config.json"


def owner_of(spec: ModelSpec) -> dict[str, str]:
    """Who an error of this spec's processor names."""
    return {"plugin": spec.name, "distribution": f"mm-plugin-{spec.name}", "version": "9.9"}


def img(seed: int = 0, height: int = 3, width: int = 4) -> np.ndarray:
    """Random levels, [height, width, 3] uint8, below 200 so that a tone can be added."""
    return np.random.default_rng(seed).integers(0, 200, (height, width, 3), dtype=np.uint8)


def png(seed: int = 0, height: int = 3, width: int = 4) -> bytes:
    """The same as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(img(seed, height, width)).save(file, "PNG")
    return file.getvalue()


def audio(seed: int = 0, count: int = 3) -> AudioSamples:
    """Random samples at `RATE`."""
    return AudioSamples(np.random.default_rng(seed).random(count, dtype=np.float32), RATE)
