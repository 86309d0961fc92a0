"""The budget of a container's header: pieces counted, promises multiplied out, and what FFmpeg takes measured from outside."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from core.tests.container_bombs import (
    BOMBS,
    FTYP,
    box,
    chunk,
    element,
    full,
    indexes_of_one,
    matroska,
    mp4,
    table,
    trak,
    wav,
)
from mm_plugin.errors import MediaError
from mm_plugin.media import open_audio
from mm_plugin.media.container_headers import check_head, without_tags
from mm_plugin.media.header_budget import MOST_PIECES, MOST_PRODUCT, Budget
from mm_plugin.settings import Settings

SIZE = 4 << 20
SECONDS = 4.0  # of the processor, for 4 MB; wide, since other tests run beside this one
MEGABYTES = 256


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("modality", ["audio", "video"])
def test_no_header_costs_more_than_its_budget(modality: str, fresh: Callable[..., Any]) -> None:
    """All of them in one process of its own, whose peak of memory is that of the worst."""
    code = f"""
import json, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import av, numpy
from core.tests.container_bombs import BOMBS
from mm_plugin.errors import MediaError
from mm_plugin.media import open_audio, open_video
from mm_plugin.settings import Settings
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) >> 10
costs = {{}}
bombs = {{name: make({SIZE}) for name, make in BOMBS.items()}}
for name, data in bombs.items():
    before, began = peak(), time.process_time()
    try:
        if {modality!r} == "audio":
            source = open_audio(data, path="m", settings=Settings())
            source.decode(source.probe(16_000))
        else:
            open_video(data, path="m", settings=Settings()).probe()
    except MediaError as error:
        assert error.path == "m", name
    costs[name] = [peak() - before, time.process_time() - began]
print(json.dumps(costs))
"""
    costs = fresh(code)
    assert set(costs) == set(BOMBS)
    assert {name: cost for name, cost in costs.items() if cost[0] > MEGABYTES or cost[1] > SECONDS} == {}


@pytest.mark.parametrize(
    "name", [name for name in BOMBS if name.startswith(("mp4, box", "mp4, words", "mkv, at", "wav, ch", "flac"))]
)
def test_pieces_are_counted_and_the_count_ends(name: str) -> None:
    """Twice the file is twice the pieces, up to the budget, and no piece is looked at after it."""
    counts = []
    for size in (1_400, 2_800):
        budget = Budget()
        check_head(without_tags(BOMBS[name](size), budget), budget=budget)
        counts.append(budget.pieces)
    assert 1.9 < counts[1] / counts[0] < 2.1
    budget = Budget()
    with pytest.raises(MediaError) as caught:
        check_head(without_tags(BOMBS[name](2 * SIZE), budget), budget=budget)
    assert caught.value.reason == "head"
    assert budget.pieces <= MOST_PIECES + 1


# ---------------------------------------------------------------- promises and products


@pytest.mark.parametrize(
    "kind", [b"stts", b"ctts", b"stsc", b"stss", b"stps", b"stco", b"co64", b"elst", b"dref", b"keys", b"saio"]
)
@pytest.mark.parametrize("claimed", [5000, 1 << 24, 0xFFFFFFFF])
def test_a_table_of_more_entries_than_the_file_can_hold_is_refused(kind: bytes, claimed: int) -> None:
    with pytest.raises(MediaError, match="remaining bytes") as caught:
        check_head(mp4(trak(3, table(kind, bytes(12), 3, claimed))))
    assert caught.value.reason == "head"
    check_head(mp4(trak(3, table(kind, bytes(12), 3))))


@pytest.mark.parametrize(("samples", "edits", "refused"), [
    (MOST_PRODUCT // 100, 100, False), (MOST_PRODUCT // 100, 101, True), (1 << 20, 4, False), (1 << 20, 5, True), (10, 9000, False),
])  # fmt: skip
def test_samples_times_edits(samples: int, edits: int, refused: bool) -> None:
    data = mp4(trak(samples, edits=edits))
    if refused:
        with pytest.raises(MediaError, match="edited samples"):
            check_head(data)
    else:
        check_head(data)


@pytest.mark.parametrize(
    ("tracks", "fragments", "refused"), [(1, 100_000, False), (2, 60_000, False), (900, 1000, False), (900, 2000, True)]
)
def test_tracks_times_fragments(tracks: int, fragments: int, refused: bool) -> None:
    data = mp4(*[trak(1)] * tracks, tail=box(b"moof", full(b"mfhd", b"\0\0\0\1")) * fragments)
    if refused:
        with pytest.raises(MediaError, match="fragments"):
            check_head(data)
    else:
        check_head(data)


@pytest.mark.parametrize(("uses", "refused"), [(1, False), (60, False), (80, True)])
def test_entries_times_indexes_of_avi(uses: int, refused: bool) -> None:
    data = indexes_of_one(uses, 60_000)
    assert (uses * 60_000 > MOST_PRODUCT) == refused
    if refused:
        with pytest.raises(MediaError, match="entries"):
            check_head(data)
    else:
        check_head(data)


FIRST = {"none": b"", "filling": b"\xec\x80", "another": b"\x42\x86\x81\1", "checksum": b"\xbf\x84abcd"}
LISTS = {
    "1254C367": b"\x73\x73\x80",
    "1043A770": b"\x45\xb9\x80",
    "1C53BB6B": b"\xbb\x80",
    "1654AE6B": b"\xae\x80",
    "1941A469": b"\x61\xa7\x80",
    "114D9B74": b"\x4d\xbb\x80",
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize(("kind", "entry"), LISTS.items(), ids=LISTS)
def test_lists_of_matroska_whatever_comes_first(kind: str, entry: bytes, first: bytes) -> None:
    check_head(matroska(element(kind, first + entry * 100)))
    with pytest.raises(MediaError) as caught:
        check_head(matroska(element(kind, first + entry * 200_000)))
    assert caught.value.reason == "head"


def test_items_of_heif_are_refused_without_a_moov_too() -> None:
    for version, count in ((0, b"\xff\xff"), (1, b"\0\1\0\0")):
        with pytest.raises(MediaError, match="items"):
            check_head(FTYP + full(b"meta", full(b"iinf", count, version=version)))


# ---------------------------------------------------------------- tags are passed over, samples are not touched


@pytest.mark.parametrize("claimed", [0, 0xFFFFFFFF, None])
def test_samples_that_look_like_tags_stay_samples(claimed: int | None) -> None:
    """A header that a stream wrote has no length: whatever follows is samples."""
    samples = b"ID3 \x10\0\0\0ID3\3" + b"LIST\x10\0\0\0INFOIART" + np.arange(2000, dtype="<i2").tobytes()
    data = bytearray(wav()[:-2008] + chunk(b"data", samples))
    if claimed is not None:
        at = data.index(b"data")
        data[at + 4 : at + 8] = claimed.to_bytes(4, "little")
    source = open_audio(bytes(data), path="a", settings=Settings())
    found = source.decode(source.probe(8000)).samples
    assert np.array_equal(found, np.frombuffer(samples, "<i2") / np.float32(32_768))


def test_the_tags_of_every_container_may_be_many() -> None:
    """Those that are cut out or passed over; the samples are the same."""
    plain = open_audio(wav(), path="a", settings=Settings())
    named = open_audio(BOMBS["wav, names"](1 << 20), path="a", settings=Settings())
    assert np.array_equal(plain.decode(plain.probe(8000)).samples, named.decode(named.probe(8000)).samples)
    file = io.BytesIO()
    with av.open(file, "w", format="wv") as out:
        stream = out.add_stream("wavpack", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.arange(4000, dtype=np.int16)[None], format="s16p", layout="mono")
        frame.sample_rate = 8000
        out.mux([*stream.encode(frame), *stream.encode(None)])
    items = b"".join(b"\1\0\0\0\0\0\0\0%07x\0x" % place for place in range(60_000))
    sizes = (len(items) + 32).to_bytes(4, "little") + (60_000).to_bytes(4, "little")
    ends = [b"APETAGEX\xd0\7\0\0" + sizes + flags + bytes(8) for flags in (b"\0\0\0\xa0", b"\0\0\0\x80")]
    tagged = file.getvalue() + ends[0] + items + ends[1]
    found = []
    for data in (file.getvalue(), tagged, tagged + b"TAG" + bytes(125)):
        source = open_audio(data, path="a", settings=Settings())
        found.append(source.decode(source.probe(8000)).samples)
    assert len(found[0]) == 4000
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
