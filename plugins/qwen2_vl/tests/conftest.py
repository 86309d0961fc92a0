"""One registry, tiny checkpoints on disk, and pictures for all tests of this plugin."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLForConditionalGeneration

import mm_plugin
from mm_plugin.testing import photographs
from mm_plugin_qwen2vl.testing import make_checkpoint

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """Numbers that were made elsewhere, by file name."""

    @functools.cache
    def read(name: str) -> Any:
        if name.endswith(".npz"):
            with np.load(DATA / name) as arrays:
                return dict(arrays)
        return json.loads((DATA / name).read_text(encoding="utf-8"))

    return read


@pytest.fixture(scope="session")
def registry() -> Iterator[mm_plugin.Registry]:
    """What is installed."""
    with mm_plugin.discover(mm_plugin.Settings(threads=2)) as found:
        yield found


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ordinary tiny checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Any:
    """The whole model, opened by transformers from the same folder."""
    return Qwen2VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def compact(registry: mm_plugin.Registry, checkpoint: Path) -> mm_plugin.ModelProcessor:
    """The processor as it is opened without options."""
    return registry.load_processor(checkpoint)


@pytest.fixture(scope="session")
def pillow(registry: mm_plugin.Registry, checkpoint: Path) -> mm_plugin.ModelProcessor:
    """Transformers' Pillow backend, bit for bit."""
    return registry.load_processor(checkpoint, resize="pillow", feature_format="float32")


@pytest.fixture(scope="session")
def torch_float(registry: mm_plugin.Registry, checkpoint: Path) -> mm_plugin.ModelProcessor:
    """Transformers' torchvision backend, bit for bit."""
    return registry.load_processor(checkpoint, resize="torch", feature_format="float32")


@pytest.fixture(scope="session")
def encoder(registry: mm_plugin.Registry, checkpoint: Path) -> mm_plugin.Encoder:
    """The vision tower alone."""
    return registry.load_encoder(checkpoint)


@pytest.fixture(scope="session")
def photo() -> Callable[..., Image.Image]:
    """A photograph by index, cut or scaled to a size (height, width)."""

    @functools.cache
    def cut(index: int = 0, height: int = 90, width: int = 130) -> Image.Image:
        _, data = photographs()[index % 2]
        return Image.open(io.BytesIO(data)).convert("RGB").resize((width, height), Image.Resampling.BOX)

    return lambda *arguments: cut(*arguments).copy()
