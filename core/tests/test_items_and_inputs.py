"""The structs that travel: hashes, model fields, plain copies and what they refuse."""

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin.arrays import as_ids
from mm_plugin.errors import SpanError, UsageError
from mm_plugin.inputs import MultimodalInputs, MultimodalProcessorOutput, SpecialTokens
from mm_plugin.items import Modality, MultimodalDataItem, MultimodalInputFormat

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "sglang_sentinels.json").read_text())
INT64_MAX = 2**63 - 1


def image(**fields: Any) -> MultimodalDataItem:
    item = MultimodalDataItem(**({"modality": Modality.IMAGE, "feature": np.zeros(1), "offsets": [(1, 2)]} | fields))
    item.set_identity(hashlib.sha256(b"item0").digest())
    return item


def output(items: list[MultimodalDataItem], seq: int = 8, **fields: Any) -> MultimodalProcessorOutput:
    ids = np.arange(seq, dtype=np.int64)
    return MultimodalProcessorOutput(
        input_ids=ids, padded_input_ids=ids.copy(), token_modalities=np.zeros(seq, np.int64), mm_items=items, **fields
    )


@pytest.mark.parametrize("case", GOLDEN["identities"], ids=lambda case: case["id"])
def test_set_identity_gives_the_reference_hash_and_sentinels(case: dict[str, Any]) -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_identity(bytes.fromhex(case["identity_hex"]))
    assert item.hash == int(case["hash"])
    assert item.pad_value == int(case["pad_value"])
    assert item.pad_values == tuple(map(int, case["pad_values"]))
    assert item.identity == bytes.fromhex(case["identity_hex"])


@pytest.mark.parametrize("case", GOLDEN["hashes"], ids=lambda case: case["id"])
def test_set_hash_keeps_64_bits_and_forgets_the_identity(case: dict[str, Any]) -> None:
    item = image()
    item.set_hash(int(case["hash_in"]))
    assert item.hash == int(case["hash_kept"])
    assert item.pad_values == tuple(map(int, case["pad_values"]))
    assert item.pad_value == int(case["pad_values"][0])
    assert item.identity is None


@pytest.mark.parametrize(
    "case",
    [case for case in GOLDEN["padding_sequences"] if "identity_hex" in case],
    ids=lambda case: case["id"],
)
def test_padding_sequence_equals_the_reference(case: dict[str, Any]) -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_identity(bytes.fromhex(case["identity_hex"]))
    for length, expected in case["padding_sequence"].items():
        assert item.padding_sequence(int(length)).tolist() == list(map(int, expected))


def test_an_item_without_identity_has_no_sentinels() -> None:
    item = MultimodalDataItem(modality=Modality.IMAGE, pad_value=77)
    with pytest.raises(UsageError, match="set_identity"):
        item.padding_values()
    with pytest.raises(UsageError):
        item.padding_sequence(3)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_an_identity_of_another_length_is_refused_and_changes_nothing(length: int) -> None:
    item = image()
    before = (item.identity, item.hash, item.pad_values)
    with pytest.raises(UsageError, match=str(length)):
        item.set_identity(b"x" * length)
    assert (item.identity, item.hash, item.pad_values) == before


@pytest.mark.parametrize("value", [Modality.VIDEO, "video", "VIDEO", "Video", 2])
def test_modality_is_parsed_from_itself_its_name_and_its_value(value: Any) -> None:
    assert Modality.parse(value) is Modality.VIDEO


@pytest.mark.parametrize("value", ["smell", "", 0, 4, -1])
def test_an_unknown_modality_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="image, video, audio") as caught:
        Modality.parse(value)
    assert caught.value.argument == "modality"


def test_values_and_arguments_of_modalities_are_fixed() -> None:
    assert [(m.name, int(m), m.argument) for m in Modality] == [
        ("IMAGE", 1, "images"),
        ("VIDEO", 2, "videos"),
        ("AUDIO", 3, "audios"),
    ]
    assert image().is_modality(Modality.VIDEO, Modality.IMAGE)
    assert not image().is_modality(Modality.VIDEO, Modality.AUDIO)


def test_model_fields_are_read_as_attributes_and_changed_by_set_only() -> None:
    item = image(model_specific_data={"image_grid_thw": (1, 4, 6)})
    assert item.image_grid_thw == item.get("image_grid_thw") == (1, 4, 6)
    item.set("image_grid_thw", (1, 2, 2))
    assert item.image_grid_thw == (1, 2, 2)
    with pytest.raises(AttributeError):
        item.image_grid_thw = (1, 1, 1)
    assert item.image_grid_thw == (1, 2, 2)


def test_a_misspelt_field_never_becomes_data() -> None:
    item = image(model_specific_data={"image_grid_thw": (1, 4, 6)})
    with pytest.raises(AttributeError):
        item.featrue = 1
    with pytest.raises(UsageError, match="image_grid_thw") as caught:
        item.set("image_grid_hw", 1)
    assert caught.value.argument == "image_grid_hw"
    with pytest.raises(AttributeError, match="image_grid_thw"):
        _ = item.image_grid_hw
    assert item.get("image_grid_hw") is None
    assert set(item.model_specific_data) == {"image_grid_thw"}


def test_a_model_field_cannot_shadow_a_field_of_the_item() -> None:
    with pytest.raises(UsageError, match="offsets"):
        image(model_specific_data={"offsets": 1})


def test_an_item_holds_a_feature_or_rows_not_both() -> None:
    with pytest.raises(UsageError, match="got more than one"):
        image(precomputed_embeddings=np.zeros(1))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_an_item_can_be_copied(duplicate: Callable[[MultimodalDataItem], MultimodalDataItem]) -> None:
    item = image(model_specific_data={"image_grid_thw": (1, 4, 6)})
    other = duplicate(item)
    assert (other.identity, other.pad_values, other.image_grid_thw) == (item.identity, item.pad_values, (1, 4, 6))
    assert item != other  # items are compared by identity, not field by field


def test_num_tokens_counts_both_ends_of_every_span() -> None:
    assert image(offsets=[(0, 0), (3, 7)]).num_tokens == 6
    assert image(offsets=[]).num_tokens == 0


@pytest.mark.parametrize(
    ("fields", "valid"),
    [
        ({}, True),
        ({"offsets": [(0, 0), (1, 1)]}, True),
        ({"offsets": []}, False),
        ({"offsets": [(2, 1)]}, False),
        ({"offsets": [(-1, 1)]}, False),
        ({"offsets": [(0, 2), (2, 3)]}, False),
        ({"offsets": [(4, 5), (0, 1)]}, False),
        ({"feature": None}, False),
        ({"feature": None, "precomputed_embeddings": np.zeros(1)}, True),
    ],
)
def test_an_item_is_valid_with_sentinels_ordered_spans_and_one_source(fields: dict[str, Any], valid: bool) -> None:
    assert image(**fields).is_valid() is valid


def test_an_item_without_sentinels_is_not_valid() -> None:
    assert not MultimodalDataItem(modality=Modality.IMAGE, feature=np.zeros(1), offsets=[(0, 1)]).is_valid()


def test_special_tokens_answer_by_modality() -> None:
    tokens = SpecialTokens(placeholders={Modality.IMAGE: 5, Modality.AUDIO: 7})
    assert (tokens.im_token_id, tokens.video_token_id, tokens.audio_token_id) == (5, None, 7)


def test_inputs_are_a_plain_copy_whose_features_are_shared() -> None:
    item = image(model_specific_data={"image_grid_thw": (1, 4, 6)})
    made = output(
        [item], mrope_positions=np.zeros((3, 8), np.int64), mrope_position_delta=-2, position_options={"rule": "own"}
    )
    inputs = MultimodalInputs.from_processor_output(made)
    assert inputs.mm_items[0].feature is item.feature
    assert inputs.mrope_positions is not None
    assert made.mrope_positions is not None
    item.offsets.append((5, 5))
    item.set("image_grid_thw", None)
    made.padded_input_ids[:] = -1
    made.input_ids[:] = -1
    made.position_options["rule"] = "other"
    made.token_modalities[:] = 9
    made.mrope_positions[:] = 9
    made.mm_items.clear()
    assert inputs.mm_items[0].offsets == [(1, 2)]
    assert inputs.mm_items[0].image_grid_thw == (1, 4, 6)
    assert inputs.padded_input_ids.tolist() == inputs.input_ids.tolist() == list(range(8))
    assert inputs.position_options == {"rule": "own"}
    assert not inputs.token_modalities.any()
    assert not inputs.mrope_positions.any()
    assert inputs.mrope_position_delta == -2


def test_totals_are_counted_by_modality() -> None:
    items = [
        image(offsets=[(0, 1)]),
        image(offsets=[(2, 2), (4, 4)], modality=Modality.VIDEO),
        image(offsets=[(5, 5)], modality=Modality.AUDIO),
        image(offsets=[(6, 7)]),
    ]
    inputs = MultimodalInputs.from_processor_output(output(items))
    assert (inputs.num_image_tokens, inputs.num_video_tokens, inputs.num_audio_tokens) == (4, 2, 1)
    assert inputs.num_mm_tokens == 7
    assert inputs.num_dropped == 0


def test_an_empty_item_without_a_span_is_dropped_and_counted() -> None:
    empty = MultimodalDataItem(modality=Modality.IMAGE)
    kept = image()
    inputs = MultimodalInputs.from_processor_output(output([empty, kept, empty]))
    assert [item.identity for item in inputs.mm_items] == [kept.identity]
    assert inputs.num_dropped == 2


@pytest.mark.parametrize(
    "fields",
    [{"feature": None}, {"offsets": []}, {"offsets": [(3, 2)]}, {"offsets": [(7, 8)]}, {"offsets": [(-1, 0)]}],
    ids=["span without content", "content without span", "backwards", "past the end", "before the start"],
)
@pytest.mark.case("2.2")
def test_an_item_that_does_not_fit_the_ids_is_refused_by_its_index(fields: dict[str, Any]) -> None:
    with pytest.raises(SpanError, match=r"mm_items\[1\]"):
        MultimodalInputs.from_processor_output(output([image(), image(**fields)]))


def test_releasing_features_keeps_spans_and_can_be_repeated() -> None:
    rows = image(
        feature=None,
        precomputed_embeddings=np.zeros(1),
        format=MultimodalInputFormat.PRECOMPUTED_EMBEDDING,
        offsets=[(4, 5)],
    )
    inputs = MultimodalInputs.from_processor_output(output([image(), rows]))
    for _ in range(2):
        inputs.release_features()
        assert all(item.feature is None and item.precomputed_embeddings is None for item in inputs.mm_items)
        assert [item.offsets for item in inputs.mm_items] == [[(1, 2)], [(4, 5)]]
    assert rows.precomputed_embeddings is not None


@pytest.mark.parametrize(
    "value",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], np.int32),
        np.array([3, 1, 2], np.uint64),
        np.array([3, 1, 2], ">i4"),
        torch.tensor([3, 1, 2]),
        torch.tensor([3, 1, 2], dtype=torch.int32),
        iter([3, 1, 2]),
        np.array([3, 9, 1, 9, 2, 9])[::2],
    ],
)
def test_any_sequence_of_integers_becomes_int64(value: Any) -> None:
    ids = as_ids(value)
    assert ids.dtype == np.int64
    assert ids.tolist() == [3, 1, 2]


@pytest.mark.parametrize("value", [[], (), np.zeros(0), torch.zeros(0)])
def test_no_ids_are_ids(value: Any) -> None:
    assert as_ids(value).shape == (0,)


def test_ids_are_always_a_new_array() -> None:
    given = np.arange(3, dtype=np.int64)
    as_ids(given)[0] = 9
    tensor = torch.arange(3)
    as_ids(tensor)[0] = 9
    assert given.tolist() == tensor.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        [[1]],
        "12",
        b"12",
        [None],
        [True],
        ["1"],
        7,
        None,
        [[1], [1, 2]],
        [2**63],
        [2**64],
        np.array([2**63], np.uint64),
        torch.tensor([1.5]),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor(1),
        torch.tensor([1]).to_sparse(),
        torch.empty(1, device="meta", dtype=torch.int64),
    ],
    ids=str,
)
def test_what_is_no_sequence_of_integers_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match="received") as caught:
        as_ids(value, what="received")
    assert caught.value.argument == "received"


def test_the_largest_id_fits() -> None:
    assert as_ids(np.array([INT64_MAX], np.uint64)).tolist() == [INT64_MAX]


def test_items_that_overlap_are_refused_when_the_scheduler_takes_them() -> None:
    items = []
    for offsets in ([(1, 3)], [(3, 5)]):
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=offsets, feature=np.zeros(1))
        item.set_hash(1)
        items.append(item)
    ids = np.arange(8)
    output = MultimodalProcessorOutput(input_ids=ids, padded_input_ids=ids, token_modalities=ids * 0, mm_items=items)
    with pytest.raises(SpanError, match="overlaps"):
        MultimodalInputs.from_processor_output(output)
