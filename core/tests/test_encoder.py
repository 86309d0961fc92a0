"""What an encoder returns is checked before it is used: a list per item, rows that fit, storage of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mm_plugin.encoder import Encoder, EncodesAudio, EncodesImages, EncodesVideos, checked_embeddings, given_embeddings
from mm_plugin.errors import EncoderError, UsageError
from mm_plugin.events import Observers
from mm_plugin.inputs import Encoded
from mm_plugin.items import Modality, MultimodalDataItem

OWNER = {"plugin": "tiny", "distribution": "mm-plugin-tiny", "version": "9.9"}
HIDDEN = 3
CPU = torch.device("cpu")


def make_item(count: int, *, rows: Any = None) -> MultimodalDataItem:
    return MultimodalDataItem(modality=Modality.IMAGE, offsets=[(4, 3 + count)], precomputed_embeddings=rows)


def check(result: Any, items: Sequence[MultimodalDataItem], dtype: torch.dtype = torch.float32) -> list[Encoded]:
    return checked_embeddings(result, items, hidden=HIDDEN, dtype=dtype, device=CPU, owner=OWNER)


class Everything(Encoder, EncodesImages, EncodesVideos, EncodesAudio):
    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Everything:
        return cls()

    def get_image_feature(self, items: Sequence[Any]) -> list[Any]:
        return ["image", *items]

    def get_video_feature(self, items: Sequence[Any]) -> list[Any]:
        return ["video", *items]

    def get_audio_feature(self, items: Sequence[Any]) -> list[Any]:
        return ["audio", *items]


class Audios(Encoder, EncodesAudio):
    @classmethod
    def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Audios:
        return cls()

    def get_audio_feature(self, items: Sequence[Any]) -> list[Any]:
        return ["audio", *items]

    def get_image_feature(self, items: Sequence[Any]) -> list[Any]:
        raise AssertionError("an encoder takes what its mixins say, not what its methods are called")


@pytest.mark.parametrize("modality", Modality)
def test_each_modality_goes_to_its_own_mixin(modality: Modality) -> None:
    items: Any = ["item"]
    assert Everything().encode(modality, items) == [modality.name.lower(), "item"]


@pytest.mark.parametrize("modality", [Modality.IMAGE, Modality.VIDEO])
def test_what_has_no_mixin_is_refused_by_name(modality: Modality) -> None:
    encoder = Audios()
    encoder.bind(version="1", owner=OWNER)
    assert encoder.encode(Modality.AUDIO, []) == ["audio"]
    with pytest.raises(EncoderError, match=f"Audios does not encode {modality.argument}") as caught:
        encoder.encode(modality, [])
    assert (caught.value.plugin, caught.value.distribution, caught.value.version) == tuple(OWNER.values())


def test_an_encoder_that_lacks_a_method_cannot_be_made() -> None:
    class Half(Encoder, EncodesImages):
        @classmethod
        def load(cls, checkpoint: Any, device: Any, dtype: Any) -> Half:
            return cls()  # type: ignore[abstract]

    with pytest.raises(TypeError, match="get_image_feature"):
        Half()  # type: ignore[abstract]


def test_binding_is_of_the_object_and_not_of_its_class() -> None:
    first, second = Everything(), Everything()
    observers = Observers()
    first.bind(version="a", owner=OWNER, observers=observers)
    assert (first.version, first.owner, first.observers) == ("a", OWNER, observers)
    assert (second.version, second.owner, second.observers) == ("", {}, None)


# ------------------------------------------------------------------ rows that were encoded


def test_rows_that_fit_come_in_order_with_their_extras() -> None:
    items = [make_item(2), make_item(1), make_item(3)]
    rows = [torch.full((item.num_tokens, HIDDEN), float(index)) for index, item in enumerate(items)]
    stack, kept = torch.arange(12.0).reshape(4, 1, HIDDEN), torch.tensor([0])
    checked = check((rows[0], Encoded(rows[1], deepstack=stack, kept=kept), rows[2]), items)
    assert [entry.embeddings.tolist() for entry in checked] == [part.tolist() for part in rows]
    assert checked[0].deepstack is None
    assert torch.equal(checked[1].deepstack, stack)
    assert torch.equal(checked[1].kept, kept)
    assert checked[1].kept.data_ptr() != kept.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_take_the_type_that_is_asked_for(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64)
    (entry,) = check([Encoded(rows, deepstack=rows[None])], [make_item(1)], dtype)
    assert (entry.embeddings.dtype, entry.deepstack.dtype) == (dtype, dtype)
    assert entry.embeddings.tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: torch.zeros(2, HIDDEN), "2, 3"),
        (lambda: torch.zeros(4, HIDDEN), "4, 3"),
        (lambda: torch.zeros(3, 4), "3, 4"),
        (lambda: torch.zeros(9), r"\[9\]"),
        (lambda: torch.zeros(1, 3, HIDDEN), "1, 3, 3"),
        (lambda: torch.zeros(3, HIDDEN, dtype=torch.int64), "int64"),
        (lambda: torch.zeros(3, HIDDEN, dtype=torch.bool), "bool"),
        (lambda: torch.zeros(3, HIDDEN, dtype=torch.complex64), "complex64"),
        (lambda: np.zeros((3, HIDDEN), dtype=np.float32), "ndarray"),
        (lambda: None, "NoneType"),
        (lambda: Encoded(torch.zeros(2, HIDDEN)), "2, 3"),
    ],
)
@pytest.mark.case("2.2")
def test_rows_that_do_not_fit_are_named_with_both_shapes(make: Callable[[], Any], found: str) -> None:
    items = [make_item(1), make_item(3)]
    with pytest.raises(EncoderError, match=rf"image 1 of 2.*\[3, 3\] floating point.*{found}") as caught:
        check([torch.zeros(1, HIDDEN), make()], items)
    assert caught.value.plugin == "tiny"


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (torch.zeros(2, 1, HIDDEN), "got Tensor"),
        (iter([]), "expected a list"),
        (None, "got NoneType"),
        ({0: torch.zeros(1, HIDDEN)}, "got dict"),
        ([torch.zeros(1, HIDDEN)], "expected 2 results, one per item, got 1"),
        ([torch.zeros(1, HIDDEN)] * 3, "expected 2 results, one per item, got 3"),
    ],
    ids=["tensor", "iterator", "none", "mapping", "too few", "too many"],
)
@pytest.mark.case("8.6")
def test_a_result_that_is_no_list_per_item_is_refused(result: Any, named: str) -> None:
    with pytest.raises(EncoderError, match=named):
        check(result, [make_item(1), make_item(1)])


@pytest.mark.parametrize(
    "stack",
    [torch.zeros(2, HIDDEN), torch.zeros(2, 1, HIDDEN), torch.zeros(2, 2, 1), "x"],
    ids=["flat", "rows", "columns", "text"],
)
@pytest.mark.case("5.10")
def test_deepstack_rows_that_do_not_fit_are_refused(stack: Any) -> None:
    with pytest.raises(EncoderError, match=r"image 0 of 1: expected deepstack \[n_layers, 2, 3\]"):
        check([Encoded(torch.zeros(2, HIDDEN), deepstack=stack)], [make_item(2)])


@pytest.mark.case("5.4")
@pytest.mark.parametrize(
    "cut",
    [
        lambda buffer: buffer[:2],
        lambda buffer: buffer[5:7],
        lambda buffer: buffer[::50],
        lambda buffer: buffer.T.contiguous().T[:2],
    ],
    ids=["first", "middle", "strided", "transposed"],
)
def test_rows_own_their_storage(cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    buffer = torch.arange(100 * HIDDEN).reshape(100, HIDDEN).float()
    rows = cut(buffer)
    expected = rows.tolist()
    (entry,) = check([Encoded(rows, deepstack=rows[None])], [make_item(2)])
    for part in (entry.embeddings, entry.deepstack):
        assert part.untyped_storage().nbytes() == 2 * HIDDEN * 4
        assert part.is_contiguous()
    buffer.zero_()
    assert entry.embeddings.tolist() == entry.deepstack[0].tolist() == expected


def test_rows_keep_no_graph() -> None:
    rows = (torch.ones(2, HIDDEN, requires_grad=True) * 2).relu()
    (entry,) = check([rows], [make_item(2)])
    assert not entry.embeddings.requires_grad
    assert entry.embeddings.grad_fn is None


# ------------------------------------------------------------------ rows that were given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numpy", [False, True])
def test_given_embeddings_take_the_type_of_the_text(dtype: torch.dtype, numpy: bool) -> None:
    values = [[0.5, 1.0, 2.0], [4.0, -8.0, 16.0]]
    rows: Any = np.array(values, dtype=np.float16) if numpy else torch.tensor(values)
    found = given_embeddings(make_item(2, rows=rows), hidden=HIDDEN, dtype=dtype, device=CPU)
    assert found.embeddings.dtype == dtype
    assert found.embeddings.tolist() == values


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (torch.zeros(1, HIDDEN), "1, 3"),
        (torch.zeros(3, HIDDEN), "3, 3"),
        (torch.zeros(2, 4), "2, 4"),
        (torch.zeros(2, HIDDEN, dtype=torch.int32), "int32"),
    ],
)
@pytest.mark.case("7.6")
def test_given_embeddings_that_do_not_fit_are_the_callers_error(rows: Any, found: str) -> None:
    with pytest.raises(UsageError, match=rf"expected \[2, 3\].*{found}") as caught:
        given_embeddings(make_item(2, rows=rows), hidden=HIDDEN, dtype=torch.float32, device=CPU)
    assert caught.value.argument == "precomputed_embeddings"
