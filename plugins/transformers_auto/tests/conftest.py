"""One registry, tiny checkpoints of every family, and images for all tests of this plugin."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import mm_plugin
from mm_plugin.demo import sample_images
from mm_plugin_transformers_auto.probed_model import ProbedModel
from mm_plugin_transformers_auto.testing import FAMILIES, make_checkpoint, missing_packages


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """No progress bars between the dots."""
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def registry() -> Iterator[mm_plugin.Registry]:
    """The installed plugins."""
    with mm_plugin.discover(mm_plugin.Settings(threads=2)) as found:
        yield found


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, quiet: None) -> Callable[[str], Path]:
    """The tiny checkpoint of a family, made once."""

    @functools.cache
    def make(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family)

    return make


@pytest.fixture(scope="session")
def composable() -> Callable[[Any], Any]:
    """Skips where the last bits of a processor's output depend on the number of inputs, as they do on some machines."""

    def check(processor: Any) -> Any:
        if "by rounding" in processor.spec.notes["media"]:
            pytest.skip(processor.spec.notes["media"])
        return processor

    return check


@pytest.fixture(scope="session")
def opened(
    registry: mm_plugin.Registry, checkpoint: Callable[[str], Path], composable: Callable[[Any], Any]
) -> Callable[[str], Any]:
    """A family's processor; skips if a package that it needs is missing."""

    @functools.cache
    def load(family: str) -> mm_plugin.ModelProcessor:
        return registry.load_processor(checkpoint(family), plugin="transformers_auto")

    def get(family: str) -> mm_plugin.ModelProcessor:
        missing = missing_packages(FAMILIES[family])
        if missing:
            pytest.skip(f"needs {missing[0]}")
        return composable(load(family))

    return get


@pytest.fixture(scope="session")
def probed() -> Callable[[Any], ProbedModel]:
    """What was learned about the checkpoint of a processor."""
    return lambda processor: ProbedModel.of(processor.checkpoint)


@pytest.fixture
def fresh(registry: mm_plugin.Registry, checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """Opens a processor of its own, which a test may break."""
    return lambda family: registry.load_processor(checkpoint(family))


@pytest.fixture(scope="session")
def encoder(registry: mm_plugin.Registry, checkpoint: Callable[[str], Path]) -> Callable[[str], mm_plugin.Encoder]:
    """A family's encoder."""
    return functools.cache(lambda family: registry.load_encoder(checkpoint(family), plugin="transformers_auto"))


@pytest.fixture(scope="session")
def model(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """A family's whole model, opened by transformers from the same folder."""

    @functools.cache
    def load(family: str) -> Any:
        cls = getattr(transformers, FAMILIES[family].architecture)
        return cls.from_pretrained(checkpoint(family), dtype=torch.float32).eval()

    return load


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """A family's processor as transformers itself opens it."""
    return functools.cache(lambda family: transformers.AutoProcessor.from_pretrained(str(checkpoint(family))))


@pytest.fixture(scope="session")
def make_image() -> Callable[..., Image.Image]:
    """An image by index, cut or scaled to a size (height, width)."""

    @functools.cache
    def cut(index: int = 0, height: int = 90, width: int = 130) -> Image.Image:
        _, data = sample_images()[index % 2]
        return Image.open(io.BytesIO(data)).convert("RGB").resize((width, height), Image.Resampling.BOX)

    return lambda *arguments: cut(*arguments).copy()
