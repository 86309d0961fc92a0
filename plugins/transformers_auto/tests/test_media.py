"""Hostile media and prompts: images that no processor takes, placeholders without media, and placeholders in a client's text."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from mm_plugin import MediaError, PlaceholderError, Registry, RequestError, UsageError
from mm_plugin.demo import sample_images
from mm_plugin_transformers_auto.testing import FAMILIES

Get = Callable[[str], Any]
HERE = [name for name, family in FAMILIES.items() if not family.needs and family.image and not family.refused]


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("family", HERE)
def test_small_thin_and_odd_images_end_in_a_result_or_a_media_error(family: str, opened: Get, encoder: Get) -> None:
    processor = opened(family)
    odd = [Image.new("RGB", size, (9, 99, 199)) for size in ((1, 1), (1, 3), (3, 1), (3, 3), (2, 90), (90, 2), (1, 64))]
    odd += [
        Image.new("P", (30, 20), 3),
        Image.new("L", (40, 30), 7),
        Image.new("RGBA", (33, 31), (1, 2, 3, 0)),
        Image.new("CMYK", (20, 30)),
    ]
    served, refused = 0, []
    for image in odd:
        data = encoded(image, "TIFF" if image.mode == "CMYK" else "PNG")
        try:
            output = processor.process(FAMILIES[family].prompt(1), [data])
        except MediaError as error:
            refused.append(error.path)
            continue
        served += 1
        (item,) = output.mm_items
        rows = encoder(family).encode(item.modality, [item])[0].embeddings
        assert len(rows) == item.num_tokens
    assert served >= 8
    assert set(refused) <= {"images[0]"}


@pytest.mark.case("1.9")
@pytest.mark.parametrize("family", HERE)
@pytest.mark.parametrize("size", [(1, 2000), (2000, 1), (3, 400)])
def test_an_image_of_one_row_is_refused_before_it_becomes_gigabytes(
    family: str, size: tuple[int, int], opened: Get, decodes: list[str]
) -> None:
    with pytest.raises(MediaError, match=r"images\[0\]: .* at most 100 times the shorter one") as caught:
        opened(family).process(FAMILIES[family].prompt(1), [encoded(Image.new("RGB", size))])
    assert caught.value.reason == "size"
    if family not in ("paligemma", "idefics2"):
        assert decodes == []


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from mm_plugin.media import ImageSource

    seen: list[str] = []
    original = ImageSource.decode
    monkeypatch.setattr(ImageSource, "decode", lambda self, *s, **a: seen.append(self.path) or original(self, *s, **a))
    return seen


def test_the_aspect_ratio_is_set_when_the_model_is_opened(registry: Registry, checkpoint: Get) -> None:
    wide = encoded(Image.new("RGB", (900, 3)))
    processor = registry.load_processor(checkpoint("llava"), max_aspect_ratio=300)
    assert len(processor.process("<image>", [wide]).mm_items) == 1
    with pytest.raises(UsageError, match="max_aspect_ratio"):
        processor.process("<image>", [wide], max_aspect_ratio=1000)


@pytest.mark.case("2.5")
@pytest.mark.parametrize("family", HERE)
def test_prompts_and_media_that_do_not_fit_are_refused(family: str, opened: Get, make_image: Any) -> None:
    for places, given in ((2, 1), (1, 2), (1, 0)):
        with pytest.raises(PlaceholderError):
            opened(family).process(FAMILIES[family].prompt(places), [make_image()] * given)
    if family != "paligemma":
        with pytest.raises(PlaceholderError):
            opened(family).process("no placeholder", [make_image()])


def test_a_model_that_places_images_itself_needs_no_placeholder(opened: Get, make_image: Any, reference: Get) -> None:
    found = opened("paligemma").process("what is this?", [make_image()])
    whole = reference("paligemma")(text=["what is this?"], images=[make_image()], return_tensors="pt")
    assert found.input_ids.tolist() == whole["input_ids"][0].tolist()


@pytest.mark.case("2.1")
def test_a_placeholder_that_a_client_types_stays_text(opened: Get, make_image: Any) -> None:
    for family in ("llava", "gemma3", "idefics3"):
        token = FAMILIES[family].image
        content = [{"type": "text", "text": f"a {token} b"}, {"type": "image"}]
        output = opened(family).process([{"role": "user", "content": content}], [make_image()])
        assert len(output.mm_items) == 1
        text = opened(family).checkpoint.tokenizer.decode(output.input_ids)
        assert f"a {token} b" in text
    content = [{"type": "text", "text": "a <image> b"}, {"type": "image"}]
    with pytest.raises(RequestError, match="takes its prompt as text"):
        opened("paligemma").process([{"role": "user", "content": content}], [make_image()])


def test_images_are_served(opened: Get) -> None:
    output = opened("idefics3").process(FAMILIES["idefics3"].prompt(2), [data for _, data in sample_images()])
    assert [item.num_tokens for item in output.mm_items] == [68, 52]
