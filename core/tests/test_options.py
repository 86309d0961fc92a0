"""Which options a model has: those that its author declares about the modalities that its spec serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any

import pytest

from mm_plugin import BaseOptions, Modality, OptionScope, RequestError, UsageError
from mm_plugin.processor.options import OptionTable


class Options(BaseOptions, frozen=True, kw_only=True):
    tile: Annotated[int, OptionScope.request("image")] = 1
    rate: Annotated[int, OptionScope.request("audio")] = 2
    gain: Annotated[int, OptionScope.load("audio")] = 3
    depth: Annotated[int, OptionScope.checkpoint("audio")] = 4
    tone: Annotated[int, OptionScope.request("image", "audio")] = 5
    seed: int = 6


def table(*modalities: Modality, **given: Any) -> OptionTable:
    spec: Any = SimpleNamespace(name="tiny", modalities=modalities)
    checkpoint: Any = SimpleNamespace(
        folder="nowhere",
        preprocessor=lambda modality: {"rate": 7, "tile": 7},
        preprocessor_source=lambda modality: "nowhere",
    )
    return OptionTable(Options, "Author", spec, checkpoint, given, {})


@pytest.mark.parametrize(
    ("modalities", "known"),
    [
        ((Modality.IMAGE,), {"background", "tile", "tone", "seed"}),
        ((Modality.AUDIO,), {"rate", "gain", "depth", "tone", "seed"}),
        ((Modality.VIDEO,), {"background", "seed"}),
        ((Modality.IMAGE, Modality.AUDIO), {"background", "tile", "rate", "gain", "depth", "tone", "seed"}),
    ],
)
def test_a_model_has_the_options_about_its_modalities(modalities: tuple[Modality, ...], known: set[str]) -> None:
    assert set(table(*modalities).scopes) == known


@pytest.mark.parametrize("name", ["rate", "gain", "depth", "no_such_option"])
def test_options_about_other_modalities_are_unknown(name: str) -> None:
    said = rf"option '{name}' of tiny is unknown; options here: background, seed, tile, tone$"
    with pytest.raises(UsageError, match=said) as caught:
        table(Modality.IMAGE, **{name: 9})
    assert caught.value.argument == name
    with pytest.raises(UsageError, match=said):
        table(Modality.IMAGE).call({name: 9})


def test_options_about_other_modalities_keep_their_default() -> None:
    found = table(Modality.IMAGE, tone=8).loaded
    assert (found.tile, found.rate, found.gain, found.tone) == (7, 2, 3, 8)
    assert table(Modality.IMAGE).call({"tone": 1}).rate == 2


def test_options_about_its_modalities_are_checked_as_before() -> None:
    with pytest.raises(RequestError, match=r"options: .*rate"):
        table(Modality.AUDIO).call({"rate": "x"})
    with pytest.raises(UsageError, match="option 'gain' of tiny is fixed when the model is opened"):
        table(Modality.AUDIO).call({"gain": 1})
    with pytest.raises(UsageError, match="option 'depth' of tiny is the checkpoint's alone"):
        table(Modality.AUDIO, depth=1)


def test_the_digest_of_a_modality_covers_the_options_about_it() -> None:
    alone, both = table(Modality.IMAGE), table(Modality.IMAGE, Modality.AUDIO)
    image = alone.effective(alone.loaded, Modality.IMAGE)
    assert both.effective(both.loaded, Modality.IMAGE) == image
    assert both.effective(both.call({"rate": 1}), Modality.IMAGE) == image
    assert both.effective(both.call({"tile": 1}), Modality.IMAGE) != image
