"""BLAKE3 in Triton: the same 32 bytes as the library for every length, address and dtype, interpreted, compiled and absent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from mm_plugin import identity

# The interpreter takes long for a launch, whatever there is in it: everything goes into two calls, in one process.
INTERPRETED = """
import json
import numpy as np, torch
from blake3 import blake3
from mm_plugin.identity.blake3_triton import digest_buffers, is_interpreted

random = np.random.default_rng(7)

def raw(buffer):
    return buffer.reshape(-1).view(torch.uint8).numpy().tobytes()

def differing(**groups):
    # The lengths, by group, of the buffers whose digest is not the library's.
    found = digest_buffers([buffer for group in groups.values() for buffer in group])
    assert len(found) == sum(map(len, groups.values()))
    answers = iter(found)
    return {name: [len(data) for data in map(raw, group) if next(answers) != blake3(data).digest()]
            for name, group in groups.items()}

def fresh(sizes):
    return [torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8)) for size in sizes]

chunks = sorted({2**power + extra for power in range(9) for extra in (-1, 0, 1)})
edges = [1024 * count + extra for count in chunks for extra in (-1, 0, 1) if 1024 * count + extra >= 0]

# Views whose addresses are odd, beside views that are aligned.
base, = fresh([9000])
views = [base[start:start + length] for start in range(8) for length in (0, 1, 3, 4, 63, 64, 65, 1024, 1027, 4096, 5001)]

# All lengths and addresses multiples of four, which takes the other way of reading; of many dtypes, by their bytes.
numbers = torch.arange(-300, 724)
words = []
for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
              torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2):
    for count in (1024, 516, 4, 0):
        words.append(numbers[:count].to(torch.float32).to(dtype).reshape(-1, 4) if dtype != torch.complex64
                     else numbers[:count].to(dtype))
assert all(word.data_ptr() % 4 == 0 and word.numel() * word.element_size() % 4 == 0 for word in words)

few = [*range(1100), *random.integers(1100, 5001, 200)]  # blocks of one chunk, and the step from one chunk to two
said = differing(short=fresh(LENGTHS), edges=fresh(edges), views=views) | differing(dtypes=words)
said |= {"interpreted": is_interpreted(), "nothing": digest_buffers([]), "num_edges": len(edges),
         "num_odd": len([view for view in views if view.data_ptr() % 2])}
print(json.dumps(said))
"""


def run(code: str, **environment: str) -> Any:
    """What a fresh interpreter prints, read as JSON."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_interpreted(lengths: str, cache: Path) -> dict[str, Any]:
    said: dict[str, Any] = run(
        INTERPRETED.replace("LENGTHS", lengths), TRITON_INTERPRET="1", TRITON_CACHE_DIR=str(cache)
    )
    assert said["interpreted"] is True
    return said


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_interpreted("few", tmp_path_factory.mktemp("triton"))


def test_lengths_to_5000_bytes_have_the_digest_of_the_library(interpreted: dict[str, Any]) -> None:
    assert interpreted["short"] == []


@pytest.mark.slow
def test_every_length_to_5000_bytes_has_the_digest_of_the_library(tmp_path: Path) -> None:
    assert run_interpreted("range(5001)", tmp_path)["short"] == []


def test_trees_around_powers_of_two_chunks_have_the_digest_of_the_library(interpreted: dict[str, Any]) -> None:
    assert interpreted["num_edges"] > 60
    assert interpreted["edges"] == []


def test_views_at_odd_addresses_are_hashed_where_they_lie(interpreted: dict[str, Any]) -> None:
    assert interpreted["num_odd"] >= 40
    assert interpreted["views"] == []


def test_every_dtype_is_hashed_by_its_bytes(interpreted: dict[str, Any]) -> None:
    assert interpreted["dtypes"] == []


def test_no_buffers_have_no_digests(interpreted: dict[str, Any]) -> None:
    assert interpreted["nothing"] == []


COMPILED = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from mm_plugin.identity import blake3_triton as kernels

chunks = {"owner": "*i32", "base": "*i64", "size": "*i64", "first": "*i64", "out": "*u32", "n_chunks": "i32",
          "BLOCK": "constexpr", "WORDS": "constexpr"}
merge = {"nodes": "*u32", "left": "*i32", "right": "*i32", "root": "*i32", "out": "*u32", "n_nodes": "i32",
         "BLOCK": "constexpr"}
kernel, signature, constants = {
    "words": (kernels.hash_chunks, chunks, {"BLOCK": 128, "WORDS": True}),
    "bytes": (kernels.hash_chunks, chunks, {"BLOCK": 128, "WORDS": False}),
    "merge": (kernels.merge_level, merge, {"BLOCK": 128}),
}["NAME"]
made = triton.compile(ASTSource(kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
cubin, ptx = made.asm["cubin"], made.asm["ptx"]
print(json.dumps({"interpreted": kernels.is_interpreted(), "cubin": len(cubin), "magic": cubin[:4].hex(),
                  "target": ".target sm_90" in ptx}))
"""


@pytest.mark.parametrize(
    "name", [pytest.param("words"), *(pytest.param(name, marks=pytest.mark.slow) for name in ("bytes", "merge"))]
)
def test_a_kernel_compiles_ahead_of_time_for_sm_90(name: str, tmp_path: Path) -> None:
    said = run(COMPILED.replace("NAME", name), TRITON_DEFAULT_FP_FUSION="1", TRITON_CACHE_DIR=str(tmp_path))
    assert said["interpreted"] is False
    assert said["cubin"] > 1000
    assert said["magic"] == b"\x7fELF".hex()
    assert said["target"]


WITHOUT = """
import importlib.util, json, logging, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else found(name, package)
sys.meta_path.insert(0, Refuse())
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("mm_plugin").addHandler(handler)
import torch
from mm_plugin.identity import Digests, feature_digest

class Elsewhere:
    # What is read of a tensor on a device.
    def __init__(self, tensor):
        self.tensor, self.device = tensor, torch.device("cuda:0")
    def cpu(self):
        return self.tensor

digests = Digests()
data = [torch.arange(length).remainder(251).to(torch.uint8) for length in (0, 3, 2049)]
answers = [digests.of([Elsewhere(part) for part in data]) for _ in range(2)]
print(json.dumps({
    "answers": [[part.hex() for part in answer] for answer in answers],
    "copied": sorted(digests.copied),
    "lines": lines,
    "cpu": feature_digest(torch.arange(3, dtype=torch.uint8)).hex(),
    "loaded": "mm_plugin.identity.blake3_triton" in sys.modules,
}))
"""


def test_without_triton_tensors_are_copied_hashed_alike_and_that_is_reported_once() -> None:
    said = run(WITHOUT)
    raws = [bytes(index % 251 for index in range(length)) for length in (0, 3, 2049)]
    assert said["answers"] == [[blake3(raw).hexdigest() for raw in raws]] * 2
    assert said["copied"] == ["cuda"]
    assert len(said["lines"]) == 1
    assert "cuda" in said["lines"][0]
    assert "mm-plugin[gpu]" in said["lines"][0]
    assert said["cpu"] == identity.feature_digest(np.arange(3, dtype=np.uint8)).hex()
    assert not said["loaded"]


# On a machine without a GPU, or without triton, the next two do not exist, so that nothing there passes for having run.
if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:

    @pytest.mark.gpu
    def test_on_a_gpu_every_length_has_the_digest_of_the_library() -> None:
        random = np.random.default_rng(3)
        sizes = [*range(5001), *(1024 * 2**power + extra for power in range(15) for extra in (-1, 0, 1))]
        raws = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        found = identity.Digests().of([torch.from_numpy(raw).cuda() for raw in raws])
        assert [answer.hex() for answer in found] == [blake3(raw.tobytes()).hexdigest() for raw in raws]

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool], ids=str
    )
    def test_on_a_gpu_a_feature_has_the_digest_that_it_has_on_the_cpu(dtype: torch.dtype) -> None:
        values = torch.arange(3 * 5 * 700).remainder(113).reshape(3, 5, 700).to(dtype)
        for here in (values, values[:, 1:, 3:], values.permute(2, 0, 1), values[:0], values[0, 0, 0]):
            assert identity.feature_digest(here.cuda()) == identity.feature_digest(here)
        assert identity._CORE_DIGESTS.copied == frozenset()
