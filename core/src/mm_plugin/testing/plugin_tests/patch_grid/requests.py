"""Requests with images and videos through the whole way, compared with transformers' own forward on its own pixels."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mm_plugin.inputs import MultimodalProcessorOutput, ProcessorOutput
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.media.types import VideoFrames
from mm_plugin.testing.embedding import embed_in_chunks
from mm_plugin.testing.patch_grid import PatchGridCheckpoints
from mm_plugin.testing.plugin_tests.base import PluginTests
from mm_plugin.testing.plugin_tests.end_to_end import ChunkTests, EndToEndTests, Expected, Request
from mm_plugin.testing.plugin_tests.media import image_of, moving_frames, png_of, video_file
from mm_plugin.testing.plugin_tests.prepared import PreparedMediaTests, random_table
from mm_plugin.testing.plugin_tests.schedules import ScheduleTests, World

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
# The smallest frames, so that every chunk size can be tried.
SMALL_FRAMES = {"video_min_pixels": 28 * 28}
GRIDS = {Modality.IMAGE: "image_grid_thw", Modality.VIDEO: "video_grid_thw"}
FEATURES = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}
# Values of options that make a difference to an image of 300 x 200 pixels and to a video of three seconds.
OPTION_VALUES: Mapping[str, list[Any]] = {
    "max_pixels": [28 * 28 * 16, 28 * 28 * 40],
    "min_pixels": [400 * 400],
    "fps": [1.0, 4.0],
    "num_frames": [4, 10],
    "min_frames": [8],
    "max_frames": [4],
    "resized_height": [{"resized_height": 112, "resized_width": 168}],
    "resized_width": [{"resized_height": 168, "resized_width": 112}],
    "video_start": [0.5],
    "video_end": [1.5],
    "video_min_pixels": [28 * 28 * 200],
    "video_max_pixels": [28 * 28 * 130],
    "video_total_pixels": [28 * 28 * 6, 28 * 28 * 400],
}
_SIZES = [(56, 56), (70, 100), (29, 120), (61, 45)]
_VIDEOS = [(4, 56, 84, 2.0), (5, 84, 56, 0.5), (1, 56, 56, 1.0)]


def request_of(prompt: str) -> Request:
    """A prompt with images and frames of several sizes, in the order in which it names them."""
    sizes, shapes = itertools.cycle(enumerate(_SIZES)), itertools.cycle(_VIDEOS)
    images, videos = [], []
    for _ in range(prompt.count("image_pad")):
        index, size = next(sizes)
        images.append(image_of(index, *size))
    for _ in range(prompt.count("video_pad")):
        *shape, fps = next(shapes)
        videos.append(VideoFrames(moving_frames(*shape), fps=fps))
    return Request(prompt, {"images": images, "videos": videos}, SMALL_FRAMES if videos else {})


class ImageLogitsTests(EndToEndTests):
    """Prompts with images: ids, pixels, positions and logits are all transformers' own. Needs `tiny`."""

    CASES: ClassVar[Mapping[str, Any]] = {
        "0": "the thing is in the other one",
        "1": f"{IMAGE}what is this?",
        "2": f"see {IMAGE}{IMAGE}",
        "3": f"a {IMAGE} then {IMAGE}\n\n{IMAGE}.",
        "4": f"{IMAGE}{IMAGE} and {IMAGE} in {IMAGE} the end",
    }

    @pytest.fixture(scope="class")
    @classmethod
    def processor(cls, pillow: Any) -> Any:
        """Transformers runs its Pillow backend."""
        return pillow

    def request_of(self, case: Any) -> Request:
        """See `EndToEndTests`."""
        return request_of(case)

    def expected(
        self, model: Any, request: Request, output: MultimodalProcessorOutput, fixtures: pytest.FixtureRequest
    ) -> Expected:
        """Transformers' model on a prompt that is expanded by text."""
        tiny: PatchGridCheckpoints = fixtures.getfixturevalue("tiny")
        tokenizer = tiny.tokenizer()
        prompt, images, vision = request.prompt, request.media["images"], {}
        if images:
            edges = {
                "shortest_edge": tiny.preprocessor["min_pixels"], "longest_edge": tiny.preprocessor["max_pixels"]
            }  # fmt: skip
            prepared = Qwen2VLImageProcessorPil(size=edges)(images=images, return_tensors="pt")
            grids = prepared["image_grid_thw"]
            vision = {"pixel_values": prepared["pixel_values"], "image_grid_thw": grids}
            first, *rest = prompt.split("<|image_pad|>")
            parts = ["<|image_pad|>" * (int(grid.prod()) // 4) + text for grid, text in zip(grids, rest, strict=True)]
            prompt = first + "".join(parts)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        types = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=types, **vision).logits[0]
        return Expected(logits, input_ids=ids[0].tolist())


class MixedLogitsTests(EndToEndTests):
    """Prompts with images and videos in any order: embeddings and logits are transformers' own. Needs `exact`.

    Transformers gets the positions made here where a prompt has videos, since it numbers text after a video differently.
    """

    CASES: ClassVar[Mapping[str, Any]] = {
        "text": "the thing is in the other one",
        "image": f"{IMAGE}what is this?",
        "video": f"{VIDEO}what happens?",
        "image, video": f"see {IMAGE}{VIDEO} now",
        "video, image": f"see {VIDEO}{IMAGE}",
        "three videos and an image": f"{VIDEO} then\n{VIDEO}{IMAGE} and {VIDEO}.",
        "both twice": f"a {IMAGE} then {VIDEO}\n\n{IMAGE}. {VIDEO} the end",
    }

    def request_of(self, case: Any) -> Request:
        """See `EndToEndTests`."""
        return request_of(case)

    def arguments(self, videos: list[MultimodalDataItem]) -> dict[str, Any]:
        """What the model's forward takes beside ids, pixels and grids."""
        return {}

    def expected(
        self, model: Any, request: Request, output: MultimodalProcessorOutput, fixtures: pytest.FixtureRequest
    ) -> Expected:
        """Transformers' model on the same ids and float pixels."""
        floats, positions = request.process(fixtures.getfixturevalue("exact")), None
        assert output.mrope_positions is not None
        assert np.array_equal(floats.mrope_positions, output.mrope_positions)
        vision: dict[str, Any] = {}
        for modality, grid in GRIDS.items():
            items = [item for item in floats.mm_items if item.modality is modality]
            if items:
                vision[FEATURES[modality]] = torch.from_numpy(np.concatenate([item.feature for item in items]))
                vision[grid] = torch.from_numpy(np.concatenate([item.get(grid) for item in items]))
        videos = [item for item in floats.mm_items if item.modality is Modality.VIDEO]
        if videos:
            positions = torch.from_numpy(output.mrope_positions)[:, None]
        seen: list[torch.Tensor] = []
        hook = model.model.language_model.register_forward_pre_hook(
            lambda _module, _arguments, named: seen.append(named["inputs_embeds"]), with_kwargs=True
        )
        try:
            with torch.no_grad():
                logits = model(
                    input_ids=torch.from_numpy(floats.input_ids)[None],
                    mm_token_type_ids=torch.from_numpy(floats.token_modalities.astype(np.int32))[None],
                    position_ids=positions,
                    **vision,
                    **self.arguments(videos),
                ).logits[0]
        finally:
            hook.remove()
        return Expected(logits, input_embeds=seen[0][0])


class MessageTests(PluginTests):
    """Messages, ids, files and URLs are the same request as text with decoded media. Needs `processor`."""

    @pytest.mark.parametrize("kind", ["messages", "ids", "files"])
    def test_every_way_in_gives_the_same_request(self, kind: str, processor: Any) -> None:
        images = [image_of(0, 56, 56), image_of(1, 70, 100)]
        tokenizer = processor.checkpoint.tokenizer
        parts = [{"type": "image", "image": images[0]}, {"type": "text", "text": "and\n\n"}, {"type": "image"}]
        plain = [{"role": "user", "content": [{"type": "image"}, parts[1], {"type": "image"}]}]
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        expected = processor.process(text, images)
        if kind == "messages":
            found = processor.process([{"role": "user", "content": parts}], images[1:])
        elif kind == "ids":
            found = processor.process(tokenizer(text)["input_ids"], images)
        else:
            files = [png_of(image) for image in images]
            url = "data:image/png;base64," + base64.b64encode(files[0]).decode()
            found = processor.process(text, [url, files[1]])
        self._same(found, expected)
        again = processor.process(expected.input_ids, images, expanded=True)
        assert [item.offsets for item in again.mm_items] == [item.offsets for item in expected.mm_items]
        assert np.array_equal(again.mrope_positions, expected.mrope_positions)

    def test_messages_interleave_images_and_videos(self, processor: Any) -> None:
        image, frames, data = image_of(0, 56, 84), VideoFrames(moving_frames(4), fps=2), video_file(24, 24)
        url = "data:video/mp4;base64," + base64.b64encode(data).decode()
        parts = [
            {"type": "video", "video": frames},
            {"type": "text", "text": "and\n\n"},
            {"type": "image", "image": image},
            {"type": "video_url", "video_url": {"url": url}},
        ]
        found = processor.process([{"role": "user", "content": parts}])
        plain = [{"role": "user", "content": [{"type": "video"}, parts[1], {"type": "image"}, {"type": "video"}]}]
        text = processor.checkpoint.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        expected = processor.process(text, [image], [frames, data])
        assert [item.modality.name for item in found.mm_items] == ["VIDEO", "IMAGE", "VIDEO"]
        self._same(found, expected)
        again = processor.process(expected.input_ids, [image], [frames, data], expanded=True)
        assert [item.offsets for item in again.mm_items] == [item.offsets for item in expected.mm_items]

    def _same(self, found: MultimodalProcessorOutput, expected: MultimodalProcessorOutput) -> None:
        for name in ("input_ids", "padded_input_ids", "mrope_positions", "token_modalities"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert [item.identity for item in found.mm_items] == [item.identity for item in expected.mm_items]


class PatchGridChunkTests(ChunkTests):
    """See `ChunkTests`; images alone, and images with videos."""

    SEVERAL: ClassVar[Mapping[str, Any]] = {
        "images": f"{IMAGE}{IMAGE} in the {IMAGE}",
        "images and videos": f"{VIDEO} then\n{VIDEO}{IMAGE} and {VIDEO}.",
    }

    def request_of(self, case: Any) -> Request:
        """See `ChunkTests`."""
        return request_of(case)

    def single(self) -> Request:
        """See `ChunkTests`."""
        return Request(f"in {IMAGE} the", {"images": [image_of(0, 84, 140)]})

    def sharing(self) -> tuple[Request, Request]:
        """See `ChunkTests`."""
        shared = image_of(0, 56, 84)
        return Request(f"a{IMAGE}", {"images": [shared]}), Request(
            f"b{IMAGE}c{IMAGE}", {"images": [image_of(1, 56, 56), shared]}
        )

    @pytest.fixture(scope="class")
    @classmethod
    def table(cls, model: Any) -> torch.nn.Embedding:
        """See `ChunkTests`."""
        table: torch.nn.Embedding = model.get_input_embeddings()
        return table


class PatchGridPreparedTests(PreparedMediaTests):
    """See `PreparedMediaTests`; an image and a video."""

    FEATURE_NAMES: ClassVar[Mapping[Modality, str]] = FEATURES
    HIDDEN: ClassVar[int] = 64
    FORMS: ClassVar[tuple[str, ...]] = ("processor", "exact", "pillow")

    def raw(self) -> Request:
        """See `PreparedMediaTests`."""
        media: dict[str, list[Any]] = {
            "images": [image_of(0, 90, 130)],
            "videos": [VideoFrames(moving_frames(5), fps=4)],
        }
        return Request(f"a {VIDEO} b {IMAGE} c", media)

    def placeholder(self, modality: Modality) -> str:
        """See `PreparedMediaTests`."""
        return IMAGE if modality is Modality.IMAGE else VIDEO

    def test_the_output_of_transformers_processor_gives_the_embeddings_of_the_raw_image(
        self, pillow: Any, encoder: Any, checkpoint: Any
    ) -> None:
        image, table = image_of(0, 90, 130), random_table(self.HIDDEN)
        prepared = dict(Qwen2VLImageProcessorPil.from_pretrained(str(checkpoint))(images=image, return_tensors="pt"))
        raw = pillow.process(f"a {IMAGE} b", [image])
        found = pillow.process(f"a {IMAGE} b", [ProcessorOutput(prepared)])
        self._same_ids(raw, found)
        expected = embed_in_chunks(raw, table, encoder, size=len(raw.input_ids))
        assert torch.equal(embed_in_chunks(found, table, encoder, size=7), expected)


class PatchGridScheduleTests(ScheduleTests):
    """See `ScheduleTests`; images and videos, some of them in several requests, or twice in one. Needs `model`, `exact`."""

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, processor: Any, exact: Any, model: Any) -> World:
        """Five requests, and the embeddings that transformers' tower gives, one item at a time."""
        images = [image_of(0, 56, 56), image_of(1, 84, 112)]
        videos = [VideoFrames(moving_frames(*shape), fps=2) for shape in ((3, 56, 84), (4, 84, 84))]
        requests: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
            ("the thing is in the other one", (), ()),
            (f"see {IMAGE}{VIDEO}", (0,), (0,)),
            (f"{VIDEO}", (), (1,)),
            (f"a {IMAGE} then {VIDEO} and {IMAGE}.", (1, 1), (0,)),
            (f"{VIDEO}{IMAGE} in {VIDEO}", (0,), (1, 0)),
        ]
        table = model.get_input_embeddings()
        outputs, references = [], []
        for prompt, shown, played in requests:
            given = [images[index] for index in shown], [videos[index] for index in played]
            options = SMALL_FRAMES if played else {}
            floats, output = (opened.process(prompt, *given, **options) for opened in (exact, processor))
            embeds = table(torch.from_numpy(output.input_ids)).detach().clone()
            for item in floats.mm_items:
                ((start, end),) = item.offsets
                embeds[start : end + 1] = tower_embeddings(model.model.visual, item)
            outputs.append(output)
            references.append(embeds)
        return World(outputs, references, table, n_items=len(images) + len(videos))


def tower_embeddings(tower: Any, item: MultimodalDataItem) -> torch.Tensor:
    """What transformers' tower gives for one item with float features."""
    grid = torch.from_numpy(item.get(GRIDS[item.modality]).copy())
    with torch.no_grad():
        embeddings: torch.Tensor = tower(torch.from_numpy(item.feature), grid_thw=grid).pooler_output
    return embeddings
