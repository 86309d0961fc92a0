"""What one request may bring in all: bytes as they arrive, audio as it is decoded, arrays before they are copied."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
import tracemalloc
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from test_ownership import Given
from toy import Toy, toy_spec

from mm_plugin.errors import LimitError, MediaError
from mm_plugin.inputs import PrecomputedEmbeddings, ProcessorOutput
from mm_plugin.items import Modality
from mm_plugin.media import AudioSamples, VideoFrames, http, open_audio
from mm_plugin.media.limits import uncounted
from mm_plugin.processor import Processor
from mm_plugin.settings import Settings

ALL = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
TOKENS = tuple(toy.TOKENS.values())
Open = Callable[..., Processor]


@pytest.fixture
def open_toy(open_words: Callable[..., Any], make_runtime: Callable[..., Any]) -> Open:
    return lambda cls=Toy, **settings: open_words(
        cls, toy_spec(*ALL, feature_names=dict.fromkeys(ALL, "pixels")), TOKENS, **settings
    )


def processed(processor: Processor, how: str, *arguments: Any, **named: Any) -> Any:
    if how == "process":
        return processor.process(*arguments, **named)
    return asyncio.run(processor.process_async(*arguments, **named))


BOTH = pytest.mark.parametrize("how", ["process", "process_async"])


def wav(seconds: float, *, rate: int = toy.RATE, seed: int = 0, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, 2, rate, 0, "NONE", ""))
        samples = np.random.default_rng(seed).integers(-900, 900, round(seconds * rate) * channels, dtype=np.int16)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


# ------------------------------------------------------------------ bytes, in every form


def forms(folder: Path) -> dict[str, Callable[[bytes], Any]]:
    def path(data: bytes) -> str:
        name = f"{hash(data)}.bin"
        (folder / name).write_bytes(data)
        return name

    return {
        "bytes": bytes,
        "bytearray": bytearray,
        "memoryview": memoryview,
        "data URL": lambda data: "data:;base64," + base64.b64encode(data).decode(),
        "base64": lambda data: base64.b64encode(data).decode(),
        "path": path,
        "file URL": lambda data: f"file://{folder / path(data)}",
        "frames": lambda data: VideoFrames([data], fps=1),
        "frames by path": lambda data: VideoFrames([path(data)], fps=1),
    }


@BOTH
@pytest.mark.parametrize("form", forms(Path()))
def test_the_bytes_of_a_request_are_limited_in_every_form(open_toy: Open, tmp_path: Path, form: str, how: str) -> None:
    files = [toy.png(seed, 5, 7) for seed in range(3)]
    values = [forms(tmp_path)[form](data) for data in files]
    total = sum(map(len, files))
    videos = form.startswith("frames")
    prompt, media = ("<video>" if videos else "<image>") * 3, {"videos" if videos else "images": values}
    root = str(tmp_path)
    fits = processed(open_toy(max_request_bytes=total, media_root=root), how, prompt, **media)
    assert len(fits.mm_items) == 3
    with pytest.raises(LimitError) as caught:
        processed(open_toy(max_request_bytes=total - 1, media_root=root), how, prompt, **media)
    assert (caught.value.setting, caught.value.limit, caught.value.value) == ("max_request_bytes", total - 1, total)
    assert caught.value.path is not None


def test_the_bytes_of_one_media_input_by_itself_count_too(open_toy: Open) -> None:
    data = toy.png()
    assert open_toy(max_request_bytes=len(data)).prepare_item("image", data)
    with pytest.raises(LimitError, match="max_request_bytes"):
        open_toy(max_request_bytes=len(data) - 1).prepare_item("image", data)


class FakeHosts:
    """In place of the network: bodies that come in pieces, and what was fetched of them so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bodies: dict[str, bytes] = {}
        self.arrived: dict[str, int] = {}
        self.piece, self.wait = 1 << 20, 0.0
        self.settings: list[Settings] = []
        monkeypatch.setattr(http, "fetch_async", self.fetch_async)
        monkeypatch.setattr(http, "fetch", lambda *arguments: asyncio.run(self.fetch_async(*arguments)))

    async def fetch_async(self, url: str, path: str, settings: Settings, arrived: Any = uncounted) -> bytes:
        self.settings.append(settings)
        body = self.bodies[url]
        began = time.monotonic()
        self.arrived[url] = 0
        for start in range(0, max(1, len(body)), self.piece):
            if time.monotonic() - began > settings.fetch_seconds:
                raise MediaError(f"{path}: the URL was not fetched within", path=path, reason="url")
            await asyncio.sleep(self.wait)
            piece = body[start : start + self.piece]
            arrived(len(piece))
            self.arrived[url] += len(piece)
        return body


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    return FakeHosts(monkeypatch)


@BOTH
def test_what_urls_lead_to_is_counted_as_it_arrives_and_once(open_toy: Open, hosts: FakeHosts, how: str) -> None:
    files = {f"http://h/{seed}": toy.png(seed, 5, 7) for seed in range(3)}
    hosts.bodies, hosts.piece = files, 10
    total = sum(map(len, files.values()))
    assert len(processed(open_toy(max_request_bytes=total), how, "<image>" * 3, list(files)).mm_items) == 3
    with pytest.raises(LimitError, match="max_request_bytes"):
        processed(open_toy(max_request_bytes=total - 1), how, "<image>" * 3, list(files))
    hosts.arrived.clear()
    with pytest.raises(LimitError, match="max_request_bytes"):
        processed(open_toy(max_request_bytes=100), how, "<image>" * 3, list(files))
    assert sum(hosts.arrived.values()) <= 100 + 3 * 10


@BOTH
def test_junk_is_refused_as_it_comes_and_the_rest_is_not_fetched(open_toy: Open, hosts: FakeHosts, how: str) -> None:
    """Of 128 URLs of 4 MB of junk, 713 MB were held before the first was looked at."""
    junk = b"junk" * (1 << 20)
    hosts.bodies = {f"http://h/{number}": junk for number in range(64)}
    hosts.bodies["http://h/0"] = b"junk"
    hosts.bodies["http://h/0"] = b"junk" * 1000
    hosts.wait = 0.001
    hosts.piece = 1 << 16
    processor = open_toy(max_images=64)
    tracemalloc.start()
    try:
        with pytest.raises(MediaError, match=r"images\[0\]"):
            processed(processor, how, "<image>" * 64, list(hosts.bodies))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert sum(hosts.arrived.values()) < 64 << 20


@BOTH
def test_the_first_error_in_order_is_raised_whatever_comes_first(open_toy: Open, hosts: FakeHosts, how: str) -> None:
    hosts.bodies = {f"http://h/{number}": b"junk" * 10 for number in range(6)}
    hosts.bodies["http://h/0"] = toy.png()
    hosts.bodies["http://h/1"] = b"junk" * 100_000  # the slowest
    hosts.piece, hosts.wait = 1 << 14, 0.003
    for _ in range(3):
        with pytest.raises(MediaError, match=r"images\[1\]"):
            processed(open_toy(), how, "<image>" * 6, list(hosts.bodies))


def test_an_error_keeps_no_media_input_alive_but_its_own(open_toy: Open, tmp_path: Path) -> None:
    values = []
    for number in range(16):
        (tmp_path / f"{number}.png").write_bytes(b"junk" * (1 << 18))
        values.append(f"{number}.png")
    processor = open_toy(media_root=str(tmp_path))
    tracemalloc.start()
    try:
        with pytest.raises(MediaError, match=r"images\[0\]") as caught:
            processor.process("<image>" * 16, values)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.path == "images[0]"
    assert kept < 3 << 20


# ------------------------------------------------------------------ arrays, before they are copied

HUGE = 1 << 40


@pytest.mark.parametrize(
    ("modality", "value"),
    [
        ("audio", AudioSamples(np.broadcast_to(np.float32(0.5), (64, 1 << 24)), 1 << 14)),
        ("audio", AudioSamples(np.broadcast_to(np.int16(5), (64, 1 << 24)), 1 << 14)),
        ("audio", AudioSamples(torch.zeros(1).expand(64, 1 << 24), 1 << 14)),
        ("image", ProcessorOutput({"pixels": np.broadcast_to(np.float32(1), (4, HUGE)), "rows": 4, "kind": 1})),
        ("image", ProcessorOutput({"pixels": torch.zeros(1).expand(4, HUGE), "rows": 4, "kind": 1})),
        ("image", PrecomputedEmbeddings(torch.zeros(1).expand(4, HUGE), {"rows": 4, "kind": 1})),
        ("image", PrecomputedEmbeddings(np.broadcast_to(np.float16(1), (4, HUGE)), {"rows": 4, "kind": 1})),
    ],
    ids=[
        "float samples",
        "int16 samples",
        "tensor of samples",
        "feature",
        "tensor",
        "embeddings",
        "array of embeddings",
    ],
)
def test_a_broadcast_view_counts_what_its_copy_would_take(open_toy: Open, modality: str, value: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LimitError) as caught:
            open_toy(Given).prepare_item(modality, value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.setting in ("max_request_bytes", "max_audio_seconds")
    assert peak < 1 << 22


def test_broadcast_pixels_count_to_the_pixels(open_toy: Open) -> None:
    pixel = np.zeros((1, 1, 1, 3), np.uint8)
    for modality, value in (
        ("image", np.broadcast_to(pixel[0], (1 << 20, 1 << 20, 3))),
        ("video", VideoFrames(np.broadcast_to(pixel, (1 << 16, 1 << 12, 1 << 12, 3)), fps=1)),
        ("video", VideoFrames([np.broadcast_to(pixel[0], (1 << 13, 1 << 13, 3))] * 100, fps=1)),
    ):
        with pytest.raises(LimitError, match="pixels"):
            open_toy().prepare_item(modality, value)


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(4).to_sparse(),
        torch.zeros(4, 2, device="meta"),
        object(),
        None,
        "text",
    ],
    ids=["sparse", "meta", "object", "nothing", "text"],
)
def test_what_cannot_be_counted_is_refused_as_what_it_is(open_toy: Open, value: Any) -> None:
    fields = {"rows": 4, "kind": 1}
    for given in (ProcessorOutput({"pixels": value, **fields}), PrecomputedEmbeddings(value, fields)):
        with pytest.raises(MediaError):
            open_toy(Given).prepare_item("image", given)
    with pytest.raises(MediaError):
        open_toy().prepare_item("audio", AudioSamples(value, 8))


def test_features_and_embeddings_count_together(open_toy: Open) -> None:
    fields = {"rows": 2, "kind": 1}
    feature = ProcessorOutput({"pixels": np.zeros((2, 5), np.float32), **fields})
    embeddings = PrecomputedEmbeddings(torch.zeros(2, 3, dtype=torch.bfloat16), fields)
    assert open_toy(Given, max_request_bytes=40 + 12).process("<image>" * 2, [feature, embeddings])
    with pytest.raises(LimitError, match=r"images\[1\].*max_request_bytes"):
        open_toy(Given, max_request_bytes=40 + 11).process("<image>" * 2, [feature, embeddings])


# ------------------------------------------------------------------ channels


@pytest.mark.parametrize("channels", [1, 2, 64, 65, 10_000])
@pytest.mark.parametrize("kind", ["float32", "int16", "tensor", "list"])
def test_channels_are_bounded(channels: int, kind: str) -> None:
    samples: Any = np.ones((channels, 4), "int16" if kind == "int16" else np.float32)
    samples = {"tensor": torch.from_numpy, "list": np.ndarray.tolist}.get(kind, lambda array: array)(samples)
    if channels > 64:
        with pytest.raises(MediaError, match="64 channels"):
            open_audio(AudioSamples(samples, 8), path="audios[0]", settings=Settings())
    else:
        assert open_audio(AudioSamples(samples, 8), path="audios[0]", settings=Settings()).probe().num_samples == 4


@pytest.mark.parametrize("channels", [1, 2, 8, 64, 65, 300])
def test_channels_of_a_file_are_bounded(channels: int) -> None:
    source = open_audio(wav(1, channels=channels), path="audios[0]", settings=Settings())
    if channels > 64:
        with pytest.raises(MediaError, match=r"audios\[0\]"):
            source.probe(toy.RATE)
    else:
        assert source.probe(toy.RATE).num_samples == toy.RATE


# ------------------------------------------------------------------ audio of a whole request


@BOTH
@pytest.mark.parametrize("given", [False, True], ids=["files", "samples"])
def test_the_audio_of_a_request_is_limited(open_toy: Open, how: str, given: bool) -> None:
    def audio(seed: int) -> Any:
        return toy.audio(seed, 2 * toy.RATE) if given else wav(2, seed=seed)

    values = [audio(seed) for seed in range(4)]
    limits = {"max_audio_seconds": 5.0, "max_item_tokens": 1000}
    fits = processed(open_toy(max_request_audio_seconds=8.0, **limits), how, "<audio>" * 4, audios=values)
    assert len(fits.mm_items) == 4
    with pytest.raises(LimitError) as caught:
        processed(open_toy(max_request_audio_seconds=7.9, **limits), how, "<audio>" * 4, audios=values)
    assert caught.value.setting == "max_request_audio_seconds"
    assert (caught.value.path or "").startswith("audios[")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from mm_plugin.media.audio import AudioSource

    plain, paths, lock = AudioSource._samples, [], threading.Lock()

    def samples(self: Any, rate: int) -> Any:
        with lock:
            paths.append(self.path)
        return plain(self, rate)

    monkeypatch.setattr(AudioSource, "_samples", samples)
    return paths


def test_audio_whose_header_is_honest_is_refused_before_it_is_decoded(open_toy: Open, decoded: list[str]) -> None:
    processor = open_toy(max_request_audio_seconds=6.0, max_audio_seconds=5.0, max_item_tokens=1000)
    with pytest.raises(LimitError, match="max_request_audio_seconds"):
        processor.process("<audio>" * 12, audios=[wav(2, seed=seed) for seed in range(12)])
    assert len(decoded) <= 3


def test_a_header_that_claims_too_much_does_not_refuse_the_request(open_toy: Open) -> None:
    values = []
    for seed in range(3):
        data = bytearray(wav(2, seed=seed))
        data[4:8] = data[40:44] = b"\xff\xff\xff\xff"  # as a writer leaves it that streams
        values.append(bytes(data))
    processor = open_toy(max_request_audio_seconds=6.0, max_audio_seconds=5.0, max_item_tokens=1000)
    assert len(processor.process("<audio>" * 3, audios=values).mm_items) == 3


def test_audio_that_is_cached_is_not_counted(open_toy: Open) -> None:
    processor = open_toy(max_request_audio_seconds=6.0, max_audio_seconds=5.0, max_item_tokens=1000)
    values = [wav(2, seed=seed) for seed in range(6)]
    for half in (values[:3], values[3:], values):
        assert len(processor.process("<audio>" * len(half), audios=half).mm_items) == len(half)


def test_a_request_that_is_measured_again_counts_once(open_toy: Open) -> None:
    processor = open_toy(max_request_audio_seconds=6.0, max_audio_seconds=5.0, max_item_tokens=1000)
    values = [wav(2, seed=seed) for seed in range(3)]
    images = [toy.png(seed) for seed in range(3)]
    output = processor.process(
        "<image>" * 3 + "<audio>" * 3, images, audios=values, max_prompt_tokens=98, on_overflow="drop_oldest"
    )
    assert output.dropped
