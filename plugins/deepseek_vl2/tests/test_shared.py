"""The shared tests of plugins, on DeepSeek-VL2: checkpoints with the released tiles, and with small ones for whole requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mm_plugin import Modality, MultimodalDataItem, MultimodalProcessorOutput, Registry
from mm_plugin.testing.plugin_tests import (
    CheckpointTests,
    ChunkTests,
    CorpusTests,
    EncoderTests,
    EndToEndTests,
    Expected,
    ImportTests,
    OptionSweepTests,
    PreparedFieldsTests,
    PreparedMediaTests,
    ProvenanceTests,
    Request,
    ScheduleTests,
    World,
    png_of,
    schedule_test,
    tensor_faults,
)
from mm_plugin_deepseekvl2.demo import DeepseekVL2Demo
from mm_plugin_deepseekvl2.encoder import UNREAD
from mm_plugin_deepseekvl2.testing import byte_level_tokenizer, make_checkpoint, tiny_config, tiny_settings

DEMO = DeepseekVL2Demo()
SIZES = [(96, 100), (30, 200), (48, 48), (200, 60), (7, 7)]
SMALL_SIZES = [(48, 48), (48, 90), (7, 7)]  # one tile, two, one
BIAS, BLOCK = "vision.blocks.1.attn.proj.bias", "vision.blocks.1."
TILES = np.zeros((3, 3, 384, 384), np.float32)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image of which no two parts are alike."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


@pytest.mark.case("3.7")
class TestOptionSweep(OptionSweepTests):
    CHANGING = {Modality.IMAGE: {"background", "resize", "feature_format"}}


@pytest.mark.case("2.1")
class TestProvenance(ProvenanceTests):
    ROUNDS = 300

    @pytest.fixture(params=[(), ("< |", "Ċ Ċ", ": *", "Ġ <")], ids=["bytes", "merges"])
    def processor(self, request: pytest.FixtureRequest, registry: Registry, tmp_path: Path) -> Any:
        return registry.load_processor(make_checkpoint(tmp_path, tokenizer=byte_level_tokenizer(request.param)))


@pytest.mark.case("1.7")
class TestCorpus(CorpusTests):
    TAKEN = {Modality.IMAGE: 100}


class TestImports(ImportTests):
    PACKAGE = "mm_plugin_deepseekvl2"


@pytest.mark.case("3.1")
@pytest.mark.case("8.5")
class TestCheckpoints(CheckpointTests):
    MODEL = "deepseek_vl2"
    PROMPT, SIZE, TOKENS = "<image>", (300, 300), 421
    LAYOUTS = {"one shard": {"shards": 1}, "five shards": {"shards": 5}}
    FILES = {name: name for name in ("config.json", "processor_config.json", "tokenizer.json")}
    # The pooling head of released checkpoints is not among them.
    VISION = (
        "vision.blocks.", "vision.patch_embed.", "vision.pos_embed", "vision.norm.", "projector.", "image_newline",
        "view_seperator",
    )  # fmt: skip
    FAULTS = tensor_faults(BIAS, beyond="vision.blocks.2.attn.proj.bias", block=BLOCK, block_size=12) | {
        "no newline": (lambda tensors: tensors.__delitem__("image_newline"), r"1 missing \(image_newline\)"),
        "another projector": (
            lambda tensors: tensors.__setitem__("projector.layers.4.bias", torch.ones(24)),
            r"1 unexpected \(projector\.layers\.4\.bias\)",
        ),
    }
    VOCABULARY = ("language_config", "vocab_size")

    def make_checkpoint(self, folder: Path, **changed: Any) -> Path:
        return make_checkpoint(folder, **changed)


class TestEncoder(EncoderTests):
    MODEL, DISTRIBUTION, HIDDEN = "deepseek_vl2", "mm-plugin-deepseekvl2", 24

    def items(self, processor: Any, modality: Modality) -> list[MultimodalDataItem]:
        return processor.process("<image><image>", [noise(384, 768), noise(300, 300, 1)]).mm_items

    def make_checkpoint(self, folder: Path, *, seed: int | None = None) -> Path:
        return make_checkpoint(folder) if seed is None else make_checkpoint(folder, seed=seed)

    def own_parameters(self, encoder: Any) -> Mapping[str, torch.Tensor]:
        return encoder._tower.state_dict()

    def expected_parameters(self, request: pytest.FixtureRequest) -> Mapping[str, torch.Tensor]:
        files = request.getfixturevalue("checkpoint").glob("*.safetensors")
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        return {name: tensor for name, tensor in tensors.items() if not name.startswith((*UNREAD, "language."))}


class SmallTiles:
    """Fixtures of a checkpoint with tiles of 48 pixels, so that every chunk size can be tried."""

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        config, settings = tiny_config(image_size=48), tiny_settings(image_size=48)
        return make_checkpoint(tmp_path_factory.mktemp("small"), config=config, settings=settings)

    @pytest.fixture(scope="class")
    @classmethod
    def processor(cls, registry: Registry, checkpoint: Path) -> Any:
        return registry.load_processor(checkpoint)

    @pytest.fixture(scope="class")
    @classmethod
    def encoder(cls, registry: Registry, checkpoint: Path) -> Any:
        return registry.load_encoder(checkpoint)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, checkpoint: Path) -> Any:
        return DEMO.open_model(checkpoint)

    @pytest.fixture(scope="class")
    @classmethod
    def table(cls, model: Any) -> Any:
        return DEMO.input_embedding(model)

    def request_of(self, case: tuple[str, int]) -> Request:
        prompt, count = case
        return Request(prompt, {"images": [png_of(noise(*SIZES[seed], seed)) for seed in range(count)]})


class TestEndToEnd(SmallTiles, EndToEndTests):
    CASES = {str(count): (DEMO.prompt(count), count) for count in (0, 1, 2, 3, 5)}

    def text_embedding(self, model: Any) -> Any:
        return DEMO.input_embedding(model)

    def logits(self, model: Any, output: MultimodalProcessorOutput, embeds: torch.Tensor) -> torch.Tensor:
        return DEMO.logits(model, embeds, None)

    def expected(self, model: Any, request: Request, output: Any, fixtures: pytest.FixtureRequest) -> Expected:
        files, folder = request.media["images"], fixtures.getfixturevalue("checkpoint")
        if not files:
            embeds = DEMO.input_embedding(model)(torch.from_numpy(output.input_ids))
            return Expected(DEMO.logits(model, embeds, None), embeds)
        found = DEMO.reference(model, folder, output.input_ids, files)
        if len(files) > 2:  # all of one grid: in another order they still fit, and the reference tells them apart
            other = DEMO.reference(model, folder, output.input_ids, files[1:] + files[:1])
            assert not torch.allclose(found.input_embeds, other.input_embeds, rtol=0, atol=1e-3)
        return Expected(found.logits, found.input_embeds)


@pytest.mark.case("5.9")
class TestChunks(SmallTiles, ChunkTests):
    SEVERAL = {"two": ("a <image><image> b", 2), "three": ("<image> a <image><image>", 3)}

    def single(self) -> Request:
        return self.request_of(("in <image> the", 1))

    def sharing(self) -> tuple[Request, Request]:
        shared = noise(48, 48)
        return Request("a<image>", {"images": [shared]}), Request(
            "b<image>c<image>", {"images": [noise(96, 100, 1), shared]}
        )


@pytest.mark.case("5.9")
class TestSchedules(SmallTiles, ScheduleTests):
    test_every_schedule_gives_the_embeddings_of_the_reference = schedule_test(max_examples=40)

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, processor: Any, model: Any, checkpoint: Path) -> World:
        requests = [
            ("the thing", ()), ("<image><image>", (0, 1)), ("<image>", (2,)), ("a<image>b<image>", (1, 1)), ("<image>", (0,))
        ]  # fmt: skip
        table, outputs, references = DEMO.input_embedding(model), [], []
        for prompt, shown in requests:
            files = [png_of(noise(*SMALL_SIZES[index], index)) for index in shown]
            output = processor.process(prompt, files)
            ids = output.input_ids
            found = (
                DEMO.reference(model, checkpoint, ids, files).input_embeds if files else table(torch.from_numpy(ids))
            )
            outputs.append(output)
            references.append(found)
        identities = {item.identity for output in outputs for item in output.mm_items}
        return World(outputs, references, table, n_items=len(identities))


@pytest.mark.case("7.6")
class TestPreparedMedia(PreparedMediaTests):
    """An image of one tile is the same whether the others of its request leave it tiles or not."""

    FEATURE_NAMES, HIDDEN = {Modality.IMAGE: "images"}, 24

    def raw(self) -> Request:
        return Request("a <image> b", {"images": [noise(300, 300)]})

    def placeholder(self, modality: Modality) -> str:
        return "<image>"


@pytest.mark.case("2.2")
class TestPreparedFields(PreparedFieldsTests):
    MODALITY, PLACEHOLDER, FEATURE, TOKENS, HIDDEN = Modality.IMAGE, "<image>", "images", 617, 24
    GOOD = {"images": TILES, "images_spatial_crop": np.array([[2, 1]])}
    ACCEPTED = (
        {},
        {"images_spatial_crop": [[2, 1]]},
        {"images": torch.from_numpy(TILES)},
        {"images": torch.from_numpy(TILES).bfloat16()},
        {"images": np.zeros((3, 384, 384, 3), np.uint8)},
    )
    WRONG = (
        ({"images_spatial_crop": [[3, 1]]}, r"stands for \[4, 3, 384, 384\]"),
        ({"images_spatial_crop": [[1, 1]]}, r"stands for \[2, 3, 384, 384\]"),
        ({"images_spatial_crop": [[4, 4]]}, "4 x 4"),
        ({"images_spatial_crop": [[0, 0]]}, "0 x 0"),
        ({"images_spatial_crop": [[-2, -1]]}, "-2 x -1"),
        ({"images_spatial_crop": [[1 << 40, 1]]}, "1099511627776 x 1"),
        ({"images_spatial_crop": [2, 1]}, r"must be \[1, 2\]"),
        ({"images_spatial_crop": [[2.0, 1.0]]}, r"must be \[1, 2\]"),
        ({"images_spatial_crop": [[2, 1], [1, 1]]}, r"must be \[1, 2\]"),
        ({"images_spatial_crop": "2x1"}, "must be"),
        ({"images_spatial_crop": None}, "must be"),
        ({"images_spatial_crop": ...}, "images_spatial_crop"),
        ({"images": TILES.astype(np.int64)}, "int64"),
        ({"images": np.zeros((3, 384, 384, 3), np.float32)}, "images are"),
        ({"images": TILES.astype(np.uint8)}, r"stands for \[3, 384, 384, 3\]"),
        ({"images": "x"}, "dense"),
        ({"images": None}, "dense"),
        ({"images": torch.from_numpy(TILES).to_sparse()}, "dense"),
        ({"patches": 1}, "patches"),
    )
    # No grid of the model's resolutions passes the limit; `test_limits_hold_for_what_came_prepared` lowers it.
    test_fields_that_promise_too_much_are_refused_by_the_limit = None
