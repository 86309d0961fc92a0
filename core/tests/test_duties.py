"""Padding, positions, hashing, storing, embedding and observing are each a plugin's to bring, without a line in the core.

The plugin lies in `data/duties` and is really installed.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from toy import word_tokenizer

from mm_plugin import (
    EmbedOutput,
    ForwardBatch,
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    Registry,
    RequestMedia,
    UsageError,
    embed_mm_inputs,
)
from mm_plugin.embed import StepPlan
from mm_plugin.events import EncodeBatch, ItemKeyed
from mm_plugin.scheduler import pad_input_ids

SOURCE = Path(__file__).parent / "data" / "duties"
# The text embedding of id i is (i, i, i) / 10. Words are 0 and 1, `<image>` is 2.
TABLE = torch.nn.Embedding.from_pretrained((torch.arange(8.0) / 10)[:, None].repeat(1, 3))
COLOR = (10, 20, 30)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Duties"], "vocab_size": 4}))
    (folder / "preprocessor_config.json").write_text("{}")
    word_tokenizer(["<image>"]).save_pretrained(str(folder))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def registry(site: Any, open_registry: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Registry:
    parts = {name: (SOURCE / f"{name}.py").read_text() for name in ("hooks", "rules", "parts")}
    site.install(
        "mm-plugin-duties",
        parts["hooks"],
        package="duties",
        files={f"duties/{name}.py": parts[name] for name in ("rules", "parts")},
        architectures=["Duties"],
        digests=["xpu"],
        stores=["shelf"],
        observers=["seen"],
    )
    original = torch.Tensor.to

    def to(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """The test vectors reach a device that is not there."""
        away = bool(arguments) and arguments[0] == torch.device("xpu:0")
        return self.as_subclass(part("parts").Elsewhere) if away else original(self, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)
    opened: Registry = open_registry(preprocess_store="shelf", embedding_store="shelf")
    return opened


def part(name: str) -> Any:
    return sys.modules[f"duties.{name}"]


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (6, 4), COLOR).save(out, "PNG")
    return out.getvalue()


def test_the_plugin_s_own_parts_are_called_for_every_duty(registry: Registry, checkpoint: Path) -> None:
    processor = registry.load_processor(checkpoint, rule="backwards")
    encoder = registry.load_encoder(checkpoint)
    output = processor.process("word <image> <image> word", [png(), png()])
    assert output.input_ids.tolist() == [1, 2, 2, 2, 2, 1]

    # Hashing: the feature, and the vectors by which the function was checked, were hashed where they lie.
    assert part("parts").hashed[-1] == [2 * 3 * 4]
    assert len({item.identity for item in output.mm_items}) == 1

    # Positions: by the rule that was chosen at load, in the processor and in a scheduler that has none.
    assert output.mrope_positions is not None
    assert output.mrope_positions.tolist() == [[5, 4, 3, 2, 1, 0]] * 3
    assert output.position_options == {"rule": "backwards"}
    inputs = MultimodalInputs.from_processor_output(output)
    spec = registry.resolve({"architectures": ["Duties"]})
    again, delta = spec.load("positions")(inputs.mm_items, seq=6, config={}, options=inputs.position_options)
    assert (again.tolist(), delta) == (output.mrope_positions.tolist(), output.mrope_position_delta)

    # Embedding: rows are added to the placeholder's embedding, in chunks that cut both images, called with cache ids.
    media, ids = RequestMedia(inputs), torch.from_numpy(inputs.padded_input_ids)
    found, types = [], []
    for start in range(0, 6, 2):
        batch = ForwardBatch([media], [start], [2])
        step = embed_mm_inputs(ids[start : start + 2], batch, TABLE, encoder, registry.embedding_cache)
        assert step.failed == ()
        found.append(step.input_embeds)
        types += step.extra.tolist()
    image = torch.tensor([COLOR, [2 * level for level in COLOR]]).float() + 0.2
    word = torch.full((1, 3), 0.1)
    assert torch.equal(torch.cat(found), torch.cat([word, image, image, word]))
    assert types == [0, 1, 1, 1, 1, 0]

    # Storing: the prepared image, and its embeddings of 2 x 3 floats.
    shelves = part("parts").shelves
    assert len(shelves) == 2
    assert sorted(len(shelf.kept) for shelf in shelves) == [1, 1]
    assert [2 * 3 * 4] in [shelf.kept for shelf in shelves]

    # Observing: both media inputs, and one encoder call for the image.
    heard = part("hooks").heard
    assert [event.path for event in heard if isinstance(event, ItemKeyed)] == ["images[0]", "images[1]"]
    assert [event.num_items for event in heard if isinstance(event, EncodeBatch)] == [1]


def test_ids_that_come_without_offsets_are_padded_by_the_plugin_s_rule(registry: Registry, checkpoint: Path) -> None:
    processor = registry.load_processor(checkpoint)
    spec = registry.resolve({"architectures": ["Duties"]})
    items = []
    for seed in (1, 2):
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=np.zeros(1))
        item.set_hash(seed)
        items.append(item)
    ids = np.array([1, 2, 0, 2, 1, 2, 1, 2])
    before = ids.copy()
    padded = pad_input_ids(spec, processor.special_tokens, ids, items)
    (a, b), (c, d) = (item.padding_values()[:2] for item in items)
    assert padded.tolist() == [1, a, 0, b, 1, c, 1, d]
    assert ids.tolist() == before.tolist()


def test_an_option_that_a_request_may_give_chooses_no_rule_of_positions(registry: Registry, checkpoint: Path) -> None:
    processor = registry.load_processor(checkpoint)
    output = processor.process("<image>", [png()], brightness=3)
    assert output.position_options == {"rule": "forwards"}
    with pytest.raises(UsageError, match="rule"):
        processor.process("<image>", [png()], rule="backwards")
    output.position_options["rule"] = "mine"
    assert processor.process("<image>", [png()]).position_options == {"rule": "forwards"}


def test_a_fault_of_the_plugin_s_routine_names_the_plugin(
    registry: Registry, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = registry.load_processor(checkpoint)
    registry.load_encoder(checkpoint)

    def broken(text: torch.Tensor, plan: StepPlan, embeddings: Any, ids: torch.Tensor) -> Any:
        assert not plan.pieces, "it cannot add"
        return text, None

    monkeypatch.setattr(part("parts"), "embed", broken)
    encoder = registry.load_encoder(checkpoint)
    media = RequestMedia(MultimodalInputs.from_processor_output(processor.process("<image>", [png()])))
    batch = ForwardBatch([None, media], [0, 0], [1, 2])
    step: EmbedOutput = embed_mm_inputs(torch.tensor([1, 2, 2]), batch, TABLE, encoder)
    assert [(failed.request, failed.item) for failed in step.failed] == [(1, 0)]
    error: Any = step.failed[0].error
    assert (error.plugin, error.distribution, error.version) == ("duties", "mm-plugin-duties", "1.0")
    assert torch.equal(step.input_embeds[0], torch.full((3,), 0.1))


def test_a_routine_that_cannot_be_loaded_is_the_plugin_s_fault(
    registry: Registry, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mm_plugin import PluginLoadError

    registry.load_encoder(checkpoint)
    monkeypatch.delattr(part("parts"), "embed")
    with pytest.raises(PluginLoadError, match=r"names embed 'duties\.parts:embed', which cannot be loaded"):
        registry.load_encoder(checkpoint)


def test_the_scheduler_s_part_of_the_plugin_needs_no_torch(
    registry: Registry, checkpoint: Path, site: Any, fresh: Callable[..., Any]
) -> None:
    code = """
import json, sys
import numpy as np
import mm_plugin
from mm_plugin.inputs import MultimodalInputs, RequestMedia, SpecialTokens
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.scheduler import Lifecycle, merge, pad_input_ids, strip_encoder_part
from mm_plugin.embed import plan_step
from mm_plugin import ForwardBatch
registry = mm_plugin.discover()
spec = registry.resolve({"architectures": ["Duties"]})
item = MultimodalDataItem(modality=Modality.IMAGE, feature=np.zeros(1))
item.set_hash(1)
tokens = SpecialTokens(placeholders={Modality.IMAGE: 2})
padded = pad_input_ids(spec, tokens, np.array([1, 2, 0, 2]), [item])
positions, delta = spec.load("positions")([item], seq=4, config={}, options={"rule": "forwards"})
item.offsets = [(1, 3)]
inputs = MultimodalInputs(mm_items=[item], input_ids=padded, padded_input_ids=padded, token_modalities=padded,
                          mrope_positions=positions, mrope_position_delta=delta)
media = Lifecycle("recipe").admit(inputs, recipe=lambda index: np.zeros(1))
media.next_turn(merge(media.inputs, inputs, generated=[1]))
plan_step(ForwardBatch([media, inputs], [0, 0], [4, 4]))
media.advance(4), media.retract(), media.finish()
print(json.dumps([name for name in ("torch", "transformers", "duties.parts") if name in sys.modules]))
"""
    assert fresh(code, site.folder) == []
