"""Files that strangers named: FIFOs and devices are refused at once, and nothing leads out of its folder."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mm_plugin.checkpoint import Checkpoint
from mm_plugin.errors import MediaError, UsageError
from mm_plugin.files import check_regular, is_within, open_regular, special_file
from mm_plugin.media import open_audio, open_image, open_video
from mm_plugin.settings import Settings

OPENERS = {"images": open_image, "videos": open_video, "audios": open_audio}


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A FIFO that is opened without a writer blocks for ever: a writer comes after five seconds, and the test fails."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 5


def fifo(file: Path) -> None:
    os.mkfifo(file)

    def unblock() -> None:
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody waits for it
            return

    timer = threading.Timer(6, unblock)
    timer.daemon = True
    timer.start()


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def listening(file: Path) -> None:
    folder = os.open(file.parent, os.O_RDONLY)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(f"/proc/self/fd/{folder}/{file.name}")
    finally:
        os.close(folder)


def through_a_link(file: Path) -> None:
    fifo(file.with_name("pipe"))
    file.symlink_to("pipe")


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "fifo": fifo,
    "device": endless,
    "socket": listening,
    "link to a fifo": through_a_link,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    SPECIAL[kind](tmp_path / "a")
    for function in (check_regular, open_regular):
        with pytest.raises(OSError, match="regular"):
            function(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"text")
    check_regular(tmp_path / "b")
    with open_regular(tmp_path / "b") as opened:
        assert opened.read() == b"text"
    assert (special_file(tmp_path) is None) is (kind == "folder")


def test_a_file_that_is_swapped_for_a_fifo_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"")
    before = (tmp_path / "b").stat()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda *_, **__: before)
        with pytest.raises(OSError, match="regular"):
            open_regular(tmp_path / "a")


def test_a_link_is_not_followed_where_the_path_was_resolved(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"text")
    (tmp_path / "a").symlink_to("b")
    open_regular(tmp_path / "a").close()
    with pytest.raises(OSError):
        open_regular(tmp_path / "a", follow=False)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    fifo(tmp_path / "a")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(OSError):
            open_regular(tmp_path / "a")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ------------------------------------------------------------------ media inputs


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("form", ["name", "path", "url", "looks like base64"])
@pytest.mark.parametrize("argument", OPENERS)
def test_media_paths(tmp_path: Path, argument: str, form: str, kind: str) -> None:
    name = "A" * 40 if form == "looks like base64" else "a.bin"
    SPECIAL[kind](tmp_path / name)
    value = {"path": tmp_path / name, "url": f"file://{tmp_path / name}"}.get(form, name)
    settings = Settings(media_root=str(tmp_path))
    if form == "looks like base64":  # it is read as what it looks like
        OPENERS[argument](value, path=f"{argument}[0]", settings=settings)
        return
    with pytest.raises(MediaError, match=r"media_root|read") as caught:
        OPENERS[argument](value, path=f"{argument}[0]", settings=settings)
    assert (caught.value.path, caught.value.reason) == (f"{argument}[0]", "path")


# ------------------------------------------------------------------ names inside a folder


INSIDE = ["a.safetensors", "sub/a.safetensors", "./a.safetensors", "a..b", "..a", "a b", "inner-link"]
OUTSIDE = [
    "../a.safetensors",
    "sub/../../a",
    "sub/../a",
    "/etc/passwd",
    "",
    "..",
    "a\0b",
    "..\\a",
    "C:\\a",
    "out",
    "outer/a",
    "loop",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "checkpoint"
    (inside / "sub").mkdir(parents=True)
    (inside / "config.json").write_text("{}")
    (tmp_path / "a").write_bytes(b"")
    (inside / "out").symlink_to(tmp_path / "a")
    (inside / "outer").symlink_to(tmp_path)
    (inside / "inner-link").symlink_to("sub/a.safetensors")
    (inside / "loop").symlink_to("loop")
    return inside


@pytest.mark.parametrize("name", INSIDE)
def test_names_that_stay_inside(folder: Path, name: str) -> None:
    assert is_within(folder, name)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_out(folder: Path, name: str) -> None:
    assert not is_within(folder, name)


def index(folder: Path, **weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_of_weights_must_not_lead_out_of_the_folder(folder: Path, name: str) -> None:
    save_file({"x": torch.ones(1)}, folder / "a.safetensors")
    save_file({"y": torch.ones(1)}, folder.parent / "a.safetensors")
    index(folder, x="a.safetensors", y=name)
    checkpoint = Checkpoint.open(folder)
    for call in (checkpoint.tensor_names, checkpoint.fingerprint, lambda: checkpoint.read_tensors(["y"])):
        with pytest.raises(UsageError, match="leads out of it"):
            call()


def test_weights_that_are_a_link_out_of_the_folder_are_refused_without_an_index_too(folder: Path) -> None:
    save_file({"y": torch.ones(1)}, folder.parent / "b.safetensors")
    (folder / "b.safetensors").symlink_to("../b.safetensors")
    with pytest.raises(UsageError, match="leads out of it"):
        Checkpoint.open(folder).tensor_names()


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("opened", ["snapshot", "link to the snapshot", "links in a folder"])
def test_links_of_the_hubs_cache_are_followed(tmp_path: Path, opened: str, indexed: bool) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"x": torch.ones(1)}, blobs / "deadbeef")
    (blobs / "c0ffee").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/deadbeef")
    (snapshot / "config.json").symlink_to("../../blobs/c0ffee")
    if indexed:
        index(snapshot, x="model.safetensors")
    place = snapshot
    if opened == "link to the snapshot":
        place = tmp_path / "link"
        place.symlink_to(snapshot)
    elif opened == "links in a folder":
        place = tmp_path / "local"
        place.mkdir()
        for file in snapshot.iterdir():
            (place / file.name).symlink_to(file.resolve())
    assert Checkpoint.open(place).read_tensors(["x"])["x"].tolist() == [1.0]


@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "folder"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "processor_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "own.json",
    ],
)
def test_a_checkpoint_with_a_fifo_or_device_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    if name != "config.json":
        (tmp_path / "config.json").write_text("{}")
    SPECIAL[kind](tmp_path / name)
    with pytest.raises(UsageError, match="regular file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_file_that_becomes_special_later_is_refused_where_it_is_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    SPECIAL[kind](tmp_path / "own.json")
    with pytest.raises(UsageError, match="regular file"):
        checkpoint.read_json("own.json")
    SPECIAL[kind if kind != "link to a fifo" else "fifo"](tmp_path / "model.safetensors")
    for call in (checkpoint.tensor_names, lambda: checkpoint.tensors(["x"])):
        with pytest.raises(UsageError, match=r"regular file|leads out"):
            call()
