"""M-RoPE by the model's own rule: the numbers of transformers' `get_rope_index`, from offsets and grids alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mm_plugin import Modality, MultimodalDataItem, RequestError, UsageError
from mm_plugin_transformers_auto.positions import positions, rope_owner
from mm_plugin_transformers_auto.testing import FAMILIES, tiny_tokenizer

Get = Callable[[str], Any]


def config(checkpoint: Get) -> dict[str, Any]:
    return dict(json.loads((Path(checkpoint("qwen3_vl")) / "config.json").read_text()))


def item(start: int, grid: tuple[int, int, int]) -> MultimodalDataItem:
    t, h, w = grid
    fields = {"image_grid_thw": np.array([grid])}
    return MultimodalDataItem(
        modality=Modality.IMAGE, offsets=[(start, start + t * (h // 2) * (w // 2) - 1)], model_specific_data=fields
    )


def test_positions_by_hand(checkpoint: Get) -> None:
    """Two tokens of text, an image of 2 x 3 merged patches, one token of text: the next one is the largest plus one."""
    found, delta = positions([item(2, (1, 4, 6))], seq=9, config=config(checkpoint), options={})
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert delta == 5 + 1 - 9
    assert found.dtype == np.int64


def test_text_alone_has_three_equal_axes(checkpoint: Get) -> None:
    found, delta = positions([], seq=4, config=config(checkpoint), options={})
    assert found.tolist() == [[0, 1, 2, 3]] * 3
    assert delta == 0


def test_positions_equal_those_of_the_models_own_forward(checkpoint: Get, model: Get) -> None:
    ids = tiny_tokenizer(FAMILIES["qwen3_vl"]).get_vocab()
    grids = [(1, 4, 6), (1, 2, 2), (1, 8, 4)]
    tokens, items = [1, 2, 3], []
    for grid in grids:
        tokens.append(ids["<|vision_start|>"])
        items.append(item(len(tokens), grid))
        tokens += [ids["<|image_pad|>"]] * items[-1].num_tokens + [ids["<|vision_end|>"], 5]
    given = torch.tensor([tokens])
    token_types = (given == ids["<|image_pad|>"]).int()
    expected, delta = model("qwen3_vl").model.get_rope_index(
        given, image_grid_thw=torch.tensor(grids), mm_token_type_ids=token_types
    )
    found, own = positions(items, seq=len(tokens), config=config(checkpoint), options={})
    assert np.array_equal(found, expected[:, 0].numpy())
    assert own == int(delta)


def test_a_prompt_that_the_rule_cannot_read_is_the_requests_fault(checkpoint: Get, model: Get) -> None:
    """Two touching images: transformers' rule takes them for one, and raises."""
    touching = [item(1, (1, 4, 6)), item(7, (1, 2, 2))]
    with pytest.raises(RequestError, match=r"Qwen3VLModel cannot compute positions .*between its media"):
        positions(touching, seq=9, config=config(checkpoint), options={})
    apart = [item(1, (1, 4, 6)), item(8, (1, 2, 2))]
    assert positions(apart, seq=10, config=config(checkpoint), options={})[0].shape == (3, 10)


def test_a_config_without_such_a_rule_is_refused(checkpoint: Get) -> None:
    described = json.loads((Path(checkpoint("llava")) / "config.json").read_text())
    with pytest.raises(UsageError, match="LlavaForConditionalGeneration has no get_rope_index"):
        positions([], seq=4, config=described, options={})
    with pytest.raises(UsageError, match="config: transformers has no model for it"):
        positions([], seq=4, config={"model_type": "unheard_of"}, options={})


def qwen3_vl(checkpoint: Get) -> Any:
    return transformers.AutoConfig.from_pretrained(str(checkpoint("qwen3_vl")))


def test_the_class_decides_whether_positions_have_axes(opened: Get, checkpoint: Get) -> None:
    assert opened("llava").spec.positions is None
    settings = qwen3_vl(checkpoint)
    assert type(rope_owner(transformers.Qwen3VLForConditionalGeneration, settings)).__name__ == "Qwen3VLModel"
    llava = transformers.AutoConfig.from_pretrained(str(checkpoint("llava")))
    assert rope_owner(transformers.LlavaForConditionalGeneration, llava) is None


def test_a_config_without_a_key_of_the_rule_has_it_all_the_same(checkpoint: Get) -> None:
    """Qwen3-VL's own default stands in for `mrope_section` where a checkpoint has none."""
    described = config(checkpoint)
    text = described["text_config"]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(name), dict):
            text[name].pop("mrope_section", None)
    assert "mrope_section" not in json.dumps(described)
    expected, _ = positions([item(2, (1, 4, 6))], seq=9, config=config(checkpoint), options={})
    found, delta = positions([item(2, (1, 4, 6))], seq=9, config=described, options={})
    assert np.array_equal(found, expected)
    assert delta == -3


@pytest.mark.parametrize(
    "architectures", [None, [], ["Renamed"], ["Renamed", "Qwen3VLForConditionalGeneration"], "missing"]
)
def test_architectures_that_say_nothing_leave_it_to_the_type(checkpoint: Get, architectures: Any) -> None:
    """As in transformers' own auto classes."""
    described = config(checkpoint) | {"architectures": architectures}
    if architectures == "missing":
        del described["architectures"]
    found, _ = positions([item(2, (1, 4, 6))], seq=9, config=described, options={})
    assert found[:, -1].tolist() == [5, 5, 5]


def test_the_rule_of_a_part_is_found() -> None:
    """Qwen2.5-Omni has it in its thinker."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    settings = transformers.Qwen2_5OmniConfig(
        thinker_config={"text_config": text, "vision_config": {"depth": 1}, "audio_config": {"encoder_layers": 1}},
        enable_audio_output=False,
    )
    owner = rope_owner(transformers.Qwen2_5OmniForConditionalGeneration, settings)
    assert type(owner).__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert hasattr(owner.config, "audio_token_id")


def test_a_class_that_its_config_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="Qwen3VLForConditionalGeneration cannot be constructed"):
        rope_owner(transformers.Qwen3VLForConditionalGeneration, object())
