"""Fields of a session's inputs: each goes on by the rule in its annotation, and one without a rule is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import numpy as np
import pytest

from mm_plugin import Modality, MultimodalDataItem, MultimodalInputs, UsageError
from mm_plugin.inputs import NextTurn, SpecialTokens
from mm_plugin.scheduler import merge, turn_rules
from mm_plugin.scheduler.sessions import _MERGED

FIELDS = {
    "mm_items": [],
    "input_ids": np.array([3, 4]),
    "padded_input_ids": np.array([3, 4]),
    "token_modalities": np.zeros(2, np.int64),
}


class Counted(MultimodalInputs, kw_only=True):
    """Inputs with a field more, and its rule."""

    num_tiles: Annotated[int, NextTurn.SUM] = 0


class Forgetful(MultimodalInputs, kw_only=True):
    """Inputs with a field whose rule was forgotten."""

    num_tiles: int = 0


class Undecided(MultimodalInputs, kw_only=True):
    """Inputs with a field that has two rules."""

    num_tiles: Annotated[int, NextTurn.SUM, NextTurn.LATEST] = 0


def test_every_field_has_a_rule_and_every_rule_is_used() -> None:
    rules = turn_rules(MultimodalInputs)
    assert list(rules) == list(MultimodalInputs.__struct_fields__)
    assert set(rules.values()) == set(NextTurn) == set(_MERGED)


def test_a_new_field_goes_on_by_its_rule_alone() -> None:
    merged = merge(Counted(**FIELDS, num_tiles=2), Counted(**FIELDS, num_tiles=5))
    assert isinstance(merged, Counted)
    assert merged.num_tiles == 7


@pytest.mark.parametrize(("kind", "count"), [(Forgetful, 0), (Undecided, 2)], ids=["none", "two"])
def test_a_field_without_one_rule_is_named(kind: type[MultimodalInputs], count: int) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}.num_tiles: expected one NextTurn rule .* got {count}"):
        turn_rules(kind)
    with pytest.raises(TypeError, match="num_tiles"):
        merge(kind(**FIELDS), kind(**FIELDS))


def test_a_field_without_a_rule_is_an_error_when_the_scheduler_s_part_is_imported(fresh: Callable[..., Any]) -> None:
    code = """
import json
import mm_plugin.inputs.processed as processed
class Forgetful(processed.MultimodalInputs, kw_only=True):
    num_tiles: int = 0
processed.MultimodalInputs = Forgetful
try:
    import mm_plugin.scheduler.sessions
except TypeError as error:
    print(json.dumps(str(error)))
"""
    assert "Forgetful.num_tiles: expected one NextTurn rule" in fresh(code)


def test_model_ids_and_cache_ids_are_merged_side_by_side() -> None:
    """By hand: an image of two tokens in each turn, two generated ids in between."""

    def turn(first: int, seed: int) -> MultimodalInputs:
        item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(1, 2)], feature=np.zeros(1))
        item.set_hash(seed)
        model_ids = np.array([first, 9, 9])
        cache_ids = model_ids.copy()
        cache_ids[1:] = item.padding_sequence(2)
        modalities = np.array([0, 1, 1])
        return MultimodalInputs(
            mm_items=[item], input_ids=model_ids, padded_input_ids=cache_ids, token_modalities=modalities
        )

    before, after = turn(3, 1), turn(4, 2)
    merged = merge(before, after, generated=[7, 8])
    assert merged.input_ids.tolist() == [3, 9, 9, 7, 8, 4, 9, 9]
    sentinels = [item.padding_sequence(2).tolist() for item in (before.mm_items[0], after.mm_items[0])]
    assert merged.padded_input_ids.tolist() == [3, *sentinels[0], 7, 8, 4, *sentinels[1]]
    assert merged.token_modalities.tolist() == [0, 1, 1, 0, 0, 0, 1, 1]
    assert [item.offsets for item in merged.mm_items] == [[(1, 2)], [(6, 7)]]


def test_what_the_turn_says_of_tokens_and_options_is_the_latest() -> None:
    def turn(token: int, options: Mapping[str, Any]) -> MultimodalInputs:
        tokens = SpecialTokens(placeholders={Modality.IMAGE: token})
        return MultimodalInputs(**FIELDS, special_tokens=tokens, position_options=options, num_dropped=token)

    merged = merge(turn(1, {"rule": "old"}), turn(2, {"rule": "new"}))
    assert merged.special_tokens.im_token_id == 2
    assert merged.position_options == {"rule": "new"}
    assert merged.num_dropped == 3


@pytest.mark.parametrize(("arguments", "named"), [((None, 1), "before"), ((0, None), "after")])
def test_only_inputs_are_merged(arguments: tuple[Any, Any], named: str) -> None:
    given = [MultimodalInputs(**FIELDS) if argument is not None else "x" for argument in arguments]
    with pytest.raises(UsageError, match=f"{named}: expected MultimodalInputs, got str") as caught:
        merge(*given)
    assert caught.value.argument == named


def test_annotations_stay_readable_types() -> None:
    assert get_type_hints(MultimodalInputs)["input_ids"] is np.ndarray
