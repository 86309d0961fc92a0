"""Media that a processor or an encoder made already: taken as they are, checked in everything, equal to raw ones in the end."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin import (
    Encoder,
    LimitError,
    MediaError,
    Modality,
    ModelProcessor,
    MultimodalInputFormat,
    PrecomputedEmbeddings,
    ProcessorOutput,
    RequestError,
    VideoFrames,
)
from mm_plugin.demo import sample_images
from mm_plugin.testing import embed_in_chunks

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
FLOATS, LEVELS = np.zeros((16, 1176), np.float32), np.zeros((16, 3, 392), np.uint8)
GRID, SECONDS = np.array([[2, 2, 4]]), np.array([0.5])


@pytest.fixture(scope="module")
def table() -> torch.nn.Embedding:
    return torch.nn.Embedding.from_pretrained(torch.randn(320, 64, generator=torch.Generator().manual_seed(3)))


@pytest.mark.case("7.6")
@pytest.mark.parametrize("form", ["compact", "torch_float"])
def test_what_a_processor_made_gives_the_rows_of_the_raw_media(
    request: pytest.FixtureRequest,
    encoder: Encoder,
    table: torch.nn.Embedding,
    moving: Callable[..., np.ndarray],
    form: str,
) -> None:
    processor: ModelProcessor = request.getfixturevalue(form)
    prompt = f"a {VIDEO} b {IMAGE} c"
    raw = processor.process(prompt, [sample_images()[0][1]], [VideoFrames(moving(5), fps=4)], max_pixels=28 * 28 * 9)
    ready = []
    for item, name in zip(raw.mm_items, ("pixel_values_videos", "pixel_values"), strict=True):
        fields = {field: torch.from_numpy(item.get(field).copy()) for field in item.model_specific_data}
        ready.append(ProcessorOutput(fields | {name: torch.from_numpy(item.feature)}))
    again = processor.process(prompt, ready[1:], ready[:1])
    assert [item.format for item in again.mm_items] == [MultimodalInputFormat.PROCESSOR_OUTPUT] * 2
    for name in ("input_ids", "token_modalities", "mrope_positions"):
        assert np.array_equal(getattr(raw, name), getattr(again, name))
    expected = embed_in_chunks(raw, table, encoder, size=len(raw.input_ids))
    assert torch.allclose(embed_in_chunks(again, table, encoder, size=len(raw.input_ids)), expected, rtol=0, atol=1e-5)


@pytest.mark.case("7.3")
@pytest.mark.case("7.4")
def test_rows_of_a_video_that_were_encoded_already_are_written_as_they_are(
    compact: ModelProcessor, encoder: Encoder, table: torch.nn.Embedding, moving: Callable[..., np.ndarray]
) -> None:
    raw = compact.process(f"a {VIDEO} b", videos=[VideoFrames(moving(5), fps=4)])
    (rows,) = encoder.encode(Modality.VIDEO, raw.mm_items)
    fields = {name: raw.mm_items[0].get(name) for name in ("video_grid_thw", "second_per_grid_ts")}
    ready = compact.process(f"a {VIDEO} b", videos=[PrecomputedEmbeddings(rows, fields)])
    assert np.array_equal(ready.mrope_positions, raw.mrope_positions)
    expected = embed_in_chunks(raw, table, encoder, size=len(raw.input_ids))
    for size in (1, 7, len(raw.input_ids)):
        assert torch.equal(embed_in_chunks(ready, table, {}, size=size), expected)


def video(**changed: Any) -> dict[str, Any]:
    fields = {"pixel_values_videos": LEVELS, "video_grid_thw": GRID, "second_per_grid_ts": SECONDS} | changed
    return {name: value for name, value in fields.items() if value is not ...}


@pytest.mark.parametrize(
    "feature", [FLOATS, FLOATS.astype(np.float16), torch.zeros(16, 1176, dtype=torch.bfloat16), LEVELS]
)
@pytest.mark.parametrize("seconds", [SECONDS, [0.5], np.array([0.5], np.float32), torch.tensor([2]), [0.0]], ids=repr)
def test_a_video_in_every_form_that_is_one_is_taken(
    compact: ModelProcessor, encoder: Encoder, table: torch.nn.Embedding, feature: Any, seconds: Any
) -> None:
    media = ProcessorOutput(video(pixel_values_videos=feature, second_per_grid_ts=seconds))
    output = compact.process(VIDEO, videos=[media])
    assert output.mm_items[0].num_tokens == 4
    assert torch.isfinite(embed_in_chunks(output, table, encoder, size=3)).all()


@pytest.mark.case("2.2")
@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (video(second_per_grid_ts=...), "second_per_grid_ts"),
        (video(video_grid_thw=...), "video_grid_thw"),
        (video(pixel_values_videos=...), "pixel_values_videos"),
        (video(pixel_values=FLOATS), "pixel_values"),
        (video(image_grid_thw=GRID), "image_grid_thw"),
        (video(second_per_grid_ts=[float("nan")]), "second_per_grid_ts"),
        (video(second_per_grid_ts="abc"), "second_per_grid_ts"),
        (video(second_per_grid_ts=["abc"]), "second_per_grid_ts"),
        (video(second_per_grid_ts=[float("inf")]), "second_per_grid_ts"),
        (video(second_per_grid_ts=[-0.5]), "second_per_grid_ts"),
        (video(second_per_grid_ts=[1e300]), "second_per_grid_ts"),
        (video(second_per_grid_ts=[86_401.0]), "second_per_grid_ts"),
        (video(second_per_grid_ts=0.5), "second_per_grid_ts"),
        (video(second_per_grid_ts=[0.5, 0.5]), "second_per_grid_ts"),
        (video(second_per_grid_ts=["a"]), "second_per_grid_ts"),
        (video(second_per_grid_ts=[None]), "second_per_grid_ts"),
        (video(second_per_grid_ts=[1j]), "second_per_grid_ts"),
        (video(second_per_grid_ts=[1 << 70]), "second_per_grid_ts"),
        (video(video_grid_thw=[[2, 2, 3]]), "not a valid video"),
        (video(video_grid_thw=[[0, 2, 4]]), "not a valid video"),
        (video(video_grid_thw=[[-2, 2, -4]]), "not a valid video"),
        (video(video_grid_thw=[[2, 2, 4], [2, 2, 4]]), r"\[2, 3\]"),
        (video(video_grid_thw=[[2.0, 2.0, 4.0]]), "float64"),
        (video(video_grid_thw=[[2, 2, 6]]), r"\[16, 3, 392\]"),
        (video(video_grid_thw=[[1, 2, 4]]), r"\[16, 3, 392\]"),
        (video(pixel_values_videos=LEVELS[:, :, :196]), r"\[16, 3, 196\]"),
        (video(pixel_values_videos=LEVELS.reshape(16, 1176)), r"\[16, 1176\]"),
        (video(pixel_values_videos=LEVELS.astype(np.int8)), "int8"),
        (video(pixel_values_videos=FLOATS.astype(np.complex64)), "dense"),
        (video(pixel_values_videos=FLOATS[:15]), r"\[15, 1176\]"),
    ],
)
def test_fields_that_do_not_fit_are_the_clients_fault(
    compact: ModelProcessor, fields: dict[str, Any], part: str
) -> None:
    with pytest.raises(MediaError, match=part) as caught:
        compact.process(VIDEO * 2, videos=[ProcessorOutput(video()), ProcessorOutput(fields)])
    assert caught.value.path == "videos[1]"


def test_a_video_is_no_image_and_an_image_no_video(compact: ModelProcessor) -> None:
    image = {"pixel_values": np.zeros((8, 3, 196), np.uint8), "image_grid_thw": [[1, 2, 4]]}
    for prompt, given in (
        (IMAGE, {"images": [ProcessorOutput(video())]}),
        (VIDEO, {"videos": [ProcessorOutput(image)]}),
    ):
        with pytest.raises(MediaError):
            compact.process(prompt, **given)
    # Levels of two frames are not those of an image.
    with pytest.raises(MediaError, match=r"\[8, 3, 392\]"):
        compact.process(IMAGE, [ProcessorOutput(image | {"pixel_values": np.zeros((8, 3, 392), np.uint8)})])


@pytest.mark.case("7.1")
@pytest.mark.parametrize(
    "grid", [[[1 << 20, 2, 1 << 20]], [[1 << 40, 2, 2]], [[1, 1 << 62, 2]], [[1 << 21, 1 << 21, 1 << 21]]]
)
def test_a_grid_that_promises_too_much_makes_nothing_of_that_size(compact: ModelProcessor, grid: Any) -> None:
    for media in (
        ProcessorOutput(video(video_grid_thw=grid)),
        PrecomputedEmbeddings(np.zeros((2, 64), np.float32), {"video_grid_thw": grid, "second_per_grid_ts": SECONDS}),
    ):
        with pytest.raises(LimitError) as caught:
            compact.process(VIDEO, videos=[media])
        assert caught.value.setting == "max_item_tokens"


def test_a_day_between_frames_makes_nothing_of_its_length(compact: ModelProcessor) -> None:
    media = ProcessorOutput(video(second_per_grid_ts=[86_400.0]))
    compact.process(VIDEO, videos=[media])
    tracemalloc.start()
    output = compact.process(f"a {VIDEO} b", videos=[media])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert output.mrope_positions is not None
    assert output.mrope_positions.max() > 86_400
    assert most < 1 << 20


def test_a_video_that_fails_leaves_the_next_request_alone(compact: ModelProcessor) -> None:
    with pytest.raises(RequestError):
        compact.process(VIDEO, videos=[ProcessorOutput(video(second_per_grid_ts=[-1.0]))])
    assert compact.process(VIDEO, videos=[ProcessorOutput(video())]).mm_items[0].num_tokens == 4
