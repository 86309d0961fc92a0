"""`arrays`: questions about arrays and tensors that import no torch."""

import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from mm_plugin import arrays
from mm_plugin.errors import UsageError


def test_nothing_here_imports_torch():
    code = (
        "import sys, numpy as np\n"
        "from mm_plugin import arrays as a\n"
        "x = np.zeros((2, 3), np.float32)\n"
        "assert a.is_dense(x) and a.is_floating(x) and not a.is_tensor(x) and not a.is_tensor(None)\n"
        "assert a.storage_bytes(x) == a.num_bytes(x) == 24\n"
        "assert a.detached(x, x) is not x and a.writable(x) is x and a.as_ids([1, 2]).tolist() == [1, 2]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_torch_that_another_thread_is_importing_now_has_no_tensors_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert not arrays.is_tensor(np.zeros(2))
    assert not arrays.is_dense("text")


@pytest.mark.parametrize(
    ("value", "dense"),
    [
        (np.zeros(2, np.float16), True),
        (np.zeros(2, np.bool_), True),
        (np.zeros(2, np.complex64), False),
        (np.zeros(2, object), False),
        (torch.zeros(2, dtype=torch.bfloat16), True),
        (torch.zeros(2, 2).to_sparse(), False),
        ([1.0], False),
        (None, False),
    ],
    ids=repr,
)
def test_is_dense(value, dense):
    assert arrays.is_dense(value) is dense


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_bytes_of_a_view_are_those_of_what_it_keeps_alive(make):
    whole = make(1000)
    view = whole[10:20][::2]
    assert arrays.num_bytes(view) == 5 * whole.itemsize
    assert arrays.storage_bytes(view) == 1000 * whole.itemsize
    assert arrays.storage_bytes([view, b"abc"]) == 64 + 1000 * whole.itemsize + 64 + 3
    assert arrays.storage_bytes({"a": view}) == 64 + 64 + 1 + 1000 * whole.itemsize


def test_nothing_has_no_bytes():
    assert arrays.num_bytes(None) == arrays.storage_bytes(None) == 0


def test_detached_copies_what_shares_the_source_and_nothing_else():
    source = np.zeros((4, 4), np.uint8)
    for shared in (source, source[1:], torch.from_numpy(source)):
        found = arrays.detached(shared, source)
        source += 1
        assert (np.asarray(found) == 0).all()
        source -= 1
    for own in (source + 1, torch.zeros(4), "text", None):
        assert arrays.detached(own, source) is own
    big = np.zeros(1000)
    assert arrays.detached(big[:10], source).base is None  # it kept a hundred times its own bytes alive


def test_frozen_and_writable():
    source = np.zeros(3)
    frozen = arrays.frozen(source)
    assert frozen is not source
    assert not frozen.flags.writeable
    assert arrays.writable(frozen).flags.writeable
    assert arrays.writable(source) is source
    assert arrays.frozen("text") == "text"


@pytest.mark.parametrize(
    "value", [[3, 1], (3, 1), np.array([3, 1], np.int32), torch.tensor([3, 1]), iter([3, 1])], ids=type
)
def test_as_ids(value):
    ids = arrays.as_ids(value)
    assert ids.dtype == np.int64
    assert ids.tolist() == [3, 1]


@pytest.mark.parametrize("value", [{1, 2}, {1: 2}, 7, [[1]], [1.5], np.array([1 << 63], np.uint64)], ids=repr)
def test_as_ids_refuses(value):
    with pytest.raises(UsageError, match="prompt: expected"):
        arrays.as_ids(value, what="prompt")
