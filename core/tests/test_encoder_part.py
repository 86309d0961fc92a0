"""Models whose encoder part is separate: its lengths, and steps without it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_plugin.errors import SpanError, UsageError
from mm_plugin.inputs import ForwardBatch, MultimodalInputs
from mm_plugin.items import Modality, MultimodalDataItem
from mm_plugin.scheduler import encoder_len, strip_encoder_part


def crossed(length: int, *spans: tuple[int, int]) -> MultimodalInputs:
    items = [MultimodalDataItem(modality=Modality.IMAGE, offsets=[span], feature=np.zeros(1)) for span in spans]
    ids = np.zeros(length, dtype=np.int64)
    return MultimodalInputs(mm_items=items, input_ids=ids, padded_input_ids=ids, token_modalities=ids)


def test_the_separate_part_is_what_leads_the_prompt() -> None:
    assert encoder_len(None) == 0
    assert encoder_len(crossed(9)) == 0
    assert encoder_len(crossed(9, (0, 3))) == 4
    assert encoder_len(crossed(9, (4, 6), (0, 3))) == 7


@pytest.mark.parametrize("spans", [[(1, 3)], [(0, 3), (5, 6)]], ids=str)
def test_media_that_do_not_lead_the_prompt_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(SpanError, match="at the start of the prompt"):
        encoder_len(crossed(9, *spans))


def test_a_mixed_batch_is_stripped_of_its_encoder_parts() -> None:
    """By hand: media not computed, computed just now, computed long ago, none at all, and one that stands still."""
    inputs = [crossed(8, (0, 2), (3, 4)), crossed(8, (0, 2)), crossed(8, (0, 1)), None, crossed(8, (0, 3))]
    batch = ForwardBatch(inputs, [0, 3, 5, 2, 0], [7, 2, 3, 2, 0])
    ids = np.arange(100, 114)
    before = ids.copy()
    part = strip_encoder_part(ids, batch)
    assert part.input_ids.tolist() == [105, 106, 107, 108, 109, 110, 111, 112, 113]
    assert part.input_ids.dtype == np.int64
    assert part.extend_prefix_lens == [0, 0, 3, 2, 0]
    assert part.extend_seq_lens == [2, 2, 3, 2, 0]
    assert part.encoder_lens == [5, 3, 2, 0, 4]
    assert part.encoder_cached == [False, True, True, True, False]
    part.input_ids[:] = 0
    assert ids.tolist() == before.tolist()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 6)), max_size=5))
def test_steps_that_cut_no_encoder_part_keep_exactly_the_text(rows: list[tuple[int, int, int]]) -> None:
    """Each request: rows of its encoder part, text before the step (none while the part is not computed), text in it."""
    inputs, prefixes, extends, expected, flat = [], [], [], [], 0
    for media, done, text in rows:
        inputs.append(crossed(20, (0, media - 1)) if media else None)
        prefixes.append(media + done if done else 0)
        extends.append(text if done else media + text)
        expected += range(flat + (0 if done else media), flat + extends[-1])
        flat += extends[-1]
    part = strip_encoder_part(np.arange(flat), ForwardBatch(inputs, prefixes, extends))
    assert part.input_ids.tolist() == expected
    assert part.extend_prefix_lens == [done for _, done, _ in rows]
    assert part.extend_seq_lens == [text for _, _, text in rows]
    assert part.encoder_cached == [bool(done) or not media for media, done, _ in rows]


@pytest.mark.parametrize(("prefix", "extend"), [(1, 7), (3, 5), (3, 0), (0, 3), (0, 1)])
def test_a_cut_through_an_encoder_part_is_refused(prefix: int, extend: int) -> None:
    batch = ForwardBatch([None, crossed(8, (0, 3))], [0, prefix], [2, extend])
    with pytest.raises(SpanError, match="request 1: its encoder part has 4 tokens"):
        strip_encoder_part(np.zeros(2 + extend, np.int64), batch)


@pytest.mark.parametrize(
    ("ids", "prefixes", "extends"), [(3, [0], [4]), (4, [0, 0], [4]), (4, [0], [4, 0]), (3, [-1], [3])], ids=str
)
def test_ids_and_lists_that_do_not_fit_are_a_usage_error(ids: int, prefixes: list[int], extends: list[int]) -> None:
    with pytest.raises(UsageError):
        strip_encoder_part(np.zeros(ids, np.int64), ForwardBatch([None], prefixes, extends))
