"""Importing and running everything leaves the process's global state as it was: Pillow's, torch's, and Python's own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, random, sys, tempfile, warnings
import numpy, PIL.Image, PIL.ImageFile, torch, transformers

def state():
    return {
        "MAX_IMAGE_PIXELS": PIL.Image.MAX_IMAGE_PIXELS,
        "LOAD_TRUNCATED_IMAGES": PIL.ImageFile.LOAD_TRUNCATED_IMAGES,
        "MAXBLOCK": PIL.ImageFile.MAXBLOCK,
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch seed": torch.random.get_rng_state().sum().item(),
        "numpy seed": numpy.random.get_state()[1].sum().item(),
        "random seed": hash(random.getstate()),
        "warnings": [str(entry) for entry in warnings.filters],
        "path": sys.path,
        "recursion": sys.getrecursionlimit(),
    }

WORK
after = state()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""

WORK = """
from transformers.models.qwen2_vl import modeling_qwen2_vl  # what transformers changes as it is imported is not ours to answer for
from mm_plugin_deepseekvl2.testing import make_checkpoint as make_tiled
from mm_plugin_qwen2vl.testing import make_checkpoint
tiled = make_tiled(tempfile.mkdtemp())
folder = make_checkpoint(tempfile.mkdtemp())
from transformers.models.llava import modeling_llava
from mm_plugin_transformers_auto.testing import make_checkpoint as make_other
other = make_other(tempfile.mkdtemp(), "llava")
transformers.AutoTokenizer.from_pretrained(str(folder))
transformers.AutoProcessor.from_pretrained(str(other))
before = state()
import mm_plugin, mm_plugin.cli
from mm_plugin.testing import embed_in_chunks, corpus
from mm_plugin.demo import sample_images
with mm_plugin.discover() as registry:
    processor, encoder = registry.load_processor(folder), registry.load_encoder(folder)
    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    output = processor.process(slot * 2, [data for _, data in sample_images()])
    embed_in_chunks(output, torch.nn.Embedding.from_pretrained(torch.ones(320, 64)), encoder, size=50)
    fallback, tower = registry.load_processor(other), registry.load_encoder(other)
    output = fallback.process("<image> <image>", [data for _, data in sample_images()])
    embed_in_chunks(output, torch.nn.Embedding.from_pretrained(torch.ones(320, 32)), tower, size=50)
    processor, encoder = registry.load_processor(tiled), registry.load_encoder(tiled)
    output = processor.process("<image>", [sample_images()[0][1]])
    embed_in_chunks(output, torch.nn.Embedding.from_pretrained(torch.ones(320, 24)), encoder, size=500)
    try:
        processor.process("<image>", [b"broken"])
    except mm_plugin.MediaError:
        pass
for entry in [*corpus.images(), *corpus.videos(), *corpus.audios()]:
    try:
        corpus.check(entry)
    except AssertionError:
        pass
"""


def changed(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("WORK", code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.case("1.8")
def test_nothing_global_changes() -> None:
    assert changed(WORK) == []


@pytest.mark.case("1.8")
def test_this_check_can_fail() -> None:
    assert changed(
        "before = state(); PIL.Image.MAX_IMAGE_PIXELS = None; torch.set_num_threads(1 + torch.get_num_threads())"
    ) == [
        "MAX_IMAGE_PIXELS",
        "threads",
    ]
