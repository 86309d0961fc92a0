"""A scheduler without torch and transformers: positions, embeddings of an item and token ids equal those of the processor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mm_plugin_deepseekvl2.testing
import mm_plugin_qwen2vl.testing
import mm_plugin_qwen25vl.testing
from mm_plugin import Modality, MultimodalInputs, VideoFrames, discover, wire
from mm_plugin.checkpoint_files import read_vocabulary
from mm_plugin.errors import PluginError, RequestError, UsageError

CHILD = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "tokenizers"):
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Block())
from mm_plugin import discover, wire

folder, options, data = wire.unpack(sys.stdin.buffer.read())
inputs = wire.unpack(data)
with discover() as registry:
    spec = registry.resolve(folder)
    positions = registry.load_positions(folder, **options)
    found = [
        spec.name,
        positions.special_tokens,
        dict(positions.options),
        positions(inputs.mm_items, seq=len(inputs.input_ids)),
        [positions.num_embeddings(item.modality, item.model_specific_data) for item in inputs.mm_items],
    ]
assert not {"torch", "transformers", "tokenizers"} & set(sys.modules)
sys.stdout.buffer.write(b"".join(wire.pack(found)))
"""


def image(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


VIDEO = VideoFrames(np.zeros((6, 84, 56, 3), np.uint8), fps=1.5)
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_PROMPT = f"{QWEN}some text{QWEN}<|vision_start|><|video_pad|><|vision_end|>more"
CASES: dict[str, tuple[Callable[[Path], Path], str, list[Any], dict[str, Any]]] = {
    "qwen2_vl": (mm_plugin_qwen2vl.testing.make_checkpoint, QWEN_PROMPT, [VIDEO], {}),
    "qwen2_vl, with options": (mm_plugin_qwen2vl.testing.make_checkpoint, QWEN_PROMPT, [VIDEO], {"resize": "pillow"}),
    "qwen2_5_vl": (mm_plugin_qwen25vl.testing.make_checkpoint, QWEN_PROMPT, [VIDEO], {}),
    "deepseek_vl2": (mm_plugin_deepseekvl2.testing.make_checkpoint, "<image> text <image>", [], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_process_without_torch_gives_what_the_processor_gave(name: str, tmp_path: Path) -> None:
    make, prompt, videos, options = CASES[name]
    folder = make(tmp_path / "checkpoint")
    with discover() as registry:
        processor = registry.load_processor(folder, **options)
        processor.checkpoint.tokenizer.save_pretrained(folder)  # with the tokens that the plugin's tokenizer adds
        output = processor.process(prompt, [image(60, 90), image(300, 100)], videos)
    inputs, _ = output.split()
    inputs.mrope_positions = inputs.mrope_position_delta = None
    sent = b"".join(wire.pack([str(folder), options, b"".join(wire.pack(inputs))]))
    done = subprocess.run([sys.executable, "-c", CHILD], input=sent, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    spec, special, in_force, (positions, delta), counts = wire.unpack(done.stdout)
    assert (spec, special, in_force) == (processor.spec.name, processor.special_tokens, dict(output.position_options))
    assert counts == [item.num_tokens for item in output.mm_items]
    assert delta == output.mrope_position_delta
    if output.mrope_positions is None:
        assert positions is None
    else:
        assert np.array_equal(positions, output.mrope_positions)
        assert MultimodalInputs.from_processor_output(output).mrope_position_delta == delta


@pytest.fixture
def positions(tmp_path: Path) -> Any:
    folder = mm_plugin_qwen2vl.testing.make_checkpoint(tmp_path / "checkpoint")
    with discover() as registry:
        yield registry.load_positions(folder)


def test_tokens_that_a_plugin_s_tokenizer_adds_are_those_of_the_processor(tmp_path: Path) -> None:
    folder = mm_plugin_deepseekvl2.testing.make_checkpoint(tmp_path / "checkpoint")
    assert "<image>" not in read_vocabulary(folder)
    with discover() as registry:
        found = registry.load_positions(folder)
        assert found.special_tokens == registry.load_processor(folder).special_tokens
        assert found([], seq=3) == (None, None)


def test_rows_are_those_of_the_fields(positions: Any) -> None:
    assert positions.num_embeddings("image", {"image_grid_thw": np.array([[1, 4, 6]])}) == 6
    assert positions.num_embeddings(Modality.VIDEO, {"video_grid_thw": np.array([[3, 4, 6]])}) == 18


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda found: found.num_embeddings("audio", {}), RequestError),
        (lambda found: found.num_embeddings("smell", {}), UsageError),
        (lambda found: found.num_embeddings("image", {}), UsageError),
        (lambda found: found.num_embeddings("image", {"image_grid_thw": "wide"}), PluginError),
        (lambda found: found([], seq=-1), UsageError),
        (lambda found: found([], seq=1.5), UsageError),
        (lambda found: found([1], seq=3), UsageError),
    ],
    ids=range(7),
)
def test_what_cannot_be_answered_is_refused(positions: Any, call: Any, error: Any) -> None:
    with pytest.raises(error):
        call(positions)


def test_text_alone_counts_on(positions: Any) -> None:
    found, delta = positions([], seq=4)
    assert (found.tolist(), delta) == ([[0, 1, 2, 3]] * 3, 0)


def test_options_are_checked_as_for_a_processor(tmp_path: Path) -> None:
    folder = mm_plugin_qwen2vl.testing.make_checkpoint(tmp_path / "checkpoint")
    with discover() as registry, pytest.raises(UsageError, match="option 'nonsense' of qwen2_vl is unknown"):
        registry.load_positions(folder, nonsense=1)


# ---------------------------------------------------------------- vocabularies


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


ADDED = [{"id": 7, "content": "<image>"}]


def test_a_vocabulary_is_the_words_and_the_added_tokens(tmp_path: Path) -> None:
    table = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": ADDED}
    decoder = {"added_tokens_decoder": {"7": {"content": "<image>"}, "8": {"content": "<video>"}}}
    write(tmp_path, tokenizer=table, tokenizer_config=decoder, added_tokens={"<audio>": 9})
    assert read_vocabulary(tmp_path) == {"a": 0, "b": 1, "<image>": 7, "<video>": 8, "<audio>": 9}
    unigram = {"model": {"vocab": [["x", -1.5], ["y", -2.0]]}, "added_tokens": ADDED}
    assert read_vocabulary(write(tmp_path, tokenizer=unigram, tokenizer_config={}, added_tokens={})) == {
        "x": 0,
        "y": 1,
        "<image>": 7,
    }


@pytest.mark.parametrize(
    "table",
    ["{", [], {}, {"model": {}}, {"model": {"vocab": 3}}, {"model": {"vocab": {"a": "b"}}}, {"model": {"vocab": [1]}}]
    + [
        {"model": {"vocab": {}}, "added_tokens": part}
        for part in ([1], [{"id": 1}], {"a": 1}, [{"id": True, "content": "a"}])
    ],
    ids=repr,
)
def test_a_malformed_vocabulary_is_refused(table: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_vocabulary(write(tmp_path, tokenizer=table))


def test_a_checkpoint_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    folder = mm_plugin_qwen2vl.testing.make_checkpoint(tmp_path / "checkpoint")
    (folder / "tokenizer.json").unlink()
    with discover() as registry, pytest.raises(UsageError, match="save_pretrained"):
        registry.load_positions(folder)


@pytest.mark.parametrize("module", [mm_plugin_qwen2vl, mm_plugin_qwen25vl, mm_plugin_deepseekvl2])
def test_ids_are_those_of_transformers(module: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = module.testing.make_checkpoint(tmp_path / "checkpoint")
    assert read_vocabulary(folder) == AutoTokenizer.from_pretrained(str(folder)).get_vocab()
