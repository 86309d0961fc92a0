"""Whatever a server passes to the public functions ends in a result or in an error that names the right party."""

from __future__ import annotations

import io
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from PIL import Image

from mm_plugin import Checkpoint, MultimodalInputs, Settings, UsageError, discover
from mm_plugin.errors import LimitError, MediaError
from mm_plugin.media import open_image


@pytest.mark.parametrize(
    "source", [None, 123, b"\xff\x00", 1.5, ["folder"], {"a": 1}, "", "a" * 5000, "no/such/place/at/all"]
)
def test_a_checkpoint_of_no_kind_is_a_usage_error(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError):
        Checkpoint.open(source)
    with discover() as registry, pytest.raises(UsageError):
        registry.load_processor(source)


@pytest.mark.parametrize("architecture", [["x"], 3, b"x"])
def test_an_architecture_that_is_no_name_is_a_usage_error(open_registry: Callable[..., Any], architecture: Any) -> None:
    with pytest.raises(UsageError, match="architecture: expected a string, got "):
        open_registry().resolve({}, architecture=architecture)


@pytest.mark.parametrize("output", [None, {}, [], "x"])
def test_inputs_are_made_of_a_processors_output_alone(output: Any) -> None:
    with pytest.raises(UsageError, match="expected a MultimodalProcessorOutput"):
        MultimodalInputs.from_processor_output(output)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"device": "cuda:99"}, "device"),
        ({"device": "nowhere"}, "device"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"dtype": torch.int8}, "dtype"),
    ],
)
def test_a_device_or_dtype_that_cannot_be_had_is_the_servers_fault(
    open_registry: Callable[..., Any], arguments: dict[str, Any], argument: str
) -> None:
    with pytest.raises(UsageError) as caught:
        open_registry().load_encoder("nowhere", **arguments)
    assert caught.value.argument == argument


def test_processes_cannot_run_the_item_stage() -> None:
    with ProcessPoolExecutor(1) as pool, pytest.raises(UsageError, match="use threads"):
        discover(executor=pool)


def test_a_claim_in_an_unknown_group_is_a_notice(site: Any, open_registry: Callable[..., Any]) -> None:
    points = "[mm_plugin]\nodd = odd_one.hooks\n[mm_plugin.architecture]\nFoo = odd_one.hooks\n"
    site.install("odd-one", entry_points=points)
    (notice,) = [text for text in open_registry().notices if "mm_plugin.architecture'" in text]
    assert "mm_plugin.architectures" in notice


# -------------------------------------------------------------------- media that promise more than they hold


def late_png(side: int, *, orientation: int | None = None) -> bytes:
    """A PNG of one color whose metadata follow its pixels."""
    out = io.BytesIO()
    Image.new("L", (side, side // 2)).save(out, "PNG")
    data = out.getvalue()
    end = data.rindex(b"IEND") - 4
    body = b"Comment\0late" if orientation is None else _exif(orientation)
    name = b"tEXt" if orientation is None else b"eXIf"
    chunk = len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")
    return data[:end] + chunk + data[end:]


def _exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes().removeprefix(b"Exif\0\0")


@pytest.mark.case("1.8")
@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_probing_decodes_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "PNG":
        data = late_png(4000, orientation=6)
    else:
        out = io.BytesIO()
        Image.new("L", (4000, 2000)).save(out, "TIFF", compression="tiff_lzw", tiffinfo={0x0112: 6})
        data = out.getvalue()

    def refuse(*_: Any) -> None:
        raise AssertionError("pixels were decoded")

    with monkeypatch.context() as patched:
        patched.setattr("PIL.ImageFile.ImageFile.load", refuse)
        size = open_image(data, path="images[0]", settings=Settings()).probe()
    assert (size.height, size.width) == (4000, 2000)  # turned
    assert open_image(data, path="images[0]", settings=Settings()).decode().pixels.shape == (4000, 2000, 3)


def test_what_was_decoded_goes_with_the_call() -> None:
    source = open_image(late_png(3000), path="images[0]", settings=Settings())
    source.probe()
    tracemalloc.start()
    try:
        media_input = source.decode()
        held = media_input.pixels.nbytes
        del media_input
        assert tracemalloc.get_traced_memory()[0] < held / 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", ["%" * 3_000_000, "%41" * 1_000_000, "A" * 3_000_000, "%4" * 1_500_000])
def test_a_data_url_is_refused_without_growing_first(body: str) -> None:
    settings = Settings(max_media_bytes=1000)
    tracemalloc.start()
    try:
        for head in ("data:,", "data:;base64,"):
            with pytest.raises((LimitError, MediaError)):
                open_image(head + body, path="images[0]", settings=settings)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 65_534, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("pattern", ["%41", "a%41", "%%41", "%4%41", "%zz"])
def test_escapes_are_resolved_piece_by_piece_as_whole(size: int, pattern: str) -> None:
    from urllib.parse import unquote_to_bytes

    text = (pattern * size)[:size]
    settings = Settings(max_media_bytes=1 << 24)
    source = open_image(f"data:,{text}", path="images[0]", settings=settings)
    assert source._data == unquote_to_bytes(text)


@pytest.mark.parametrize("value", [bytearray(b"x"), memoryview(b"x"), b"x", "x", 5, None, {"a": 1}])
def test_one_media_in_place_of_a_list_is_the_servers_fault(value: Any) -> None:
    from mm_plugin.items import Modality
    from mm_plugin.processor.arguments import in_order

    with pytest.raises(UsageError, match="must be a list"):
        in_order(Modality.IMAGE, [], value)


@pytest.mark.parametrize("background", [(300, 0, 0), (0, -1, 0), (2**40, 0, 0), (0, 0), "white", (0.5, 0, 0)])
def test_a_background_is_three_levels(background: Any) -> None:
    import msgspec

    from mm_plugin import BaseOptions

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"background": background}, BaseOptions)
