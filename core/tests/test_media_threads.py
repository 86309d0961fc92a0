"""Images, videos and audio through a processor: in parallel, off the event loop's thread, once each; and authors' mistakes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import io
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any

import av
import numpy as np
import pytest
import toy
from PIL import Image
from toy import PlainToy, ToyOptions, toy_spec

from mm_plugin.errors import LimitError, MediaError, ProcessorError, RequestError, SizeError, UsageError
from mm_plugin.items import Modality
from mm_plugin.media import (
    AudioSamples,
    AudioSize,
    AudioSource,
    DecodedMedia,
    ImageSource,
    SampledVideo,
    Sampling,
    VideoFrames,
    VideoSize,
    probe,
)
from mm_plugin.media.video import EncodedVideo, GivenFrames
from mm_plugin.processor import ModelProcessor, OptionScope
from mm_plugin.spec import ModelSpec


class Options(ToyOptions, frozen=True, kw_only=True):
    step: Annotated[int, OptionScope.request("video")] = 10
    rate: Annotated[int, OptionScope.request("audio")] = 1000


class Processor(PlainToy):
    """A row for each image, for each sampled frame, and for each tenth of a second."""

    Options = Options

    def sample(self, size: VideoSize, options: Options) -> Sampling:
        indices = np.arange(0, size.frames, options.step, dtype=np.int64)
        return Sampling(indices, size.times(indices), size.fps / options.step)

    def sampling_rate(self, options: Options) -> int:
        return options.rate

    def rows(self, modality: Modality, size: Any, options: Options, context: None) -> int:
        if modality is Modality.AUDIO:
            return -(-size.num_samples * 10 // size.sampling_rate)
        return size.frames if modality is Modality.VIDEO else 1

    def layout(self, modality: Modality, size: Any, options: Options, context: None) -> dict[str, Any]:
        times = {"times": size.timestamps} if modality is Modality.VIDEO else {}
        return super().layout(modality, size, options, context) | times

    def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Options) -> Any:
        if decoded.modality is Modality.VIDEO:
            return np.stack([frame.mean(axis=(0, 1)) for frame in decoded.frames]).astype(np.float32)
        return decoded.pixels.mean(axis=(0, 1)) if decoded.modality is Modality.IMAGE else decoded.samples


FIELDS = dict.fromkeys(Modality, ("rows", "kind")) | {Modality.VIDEO: ("rows", "kind", "times")}


def spec(*modalities: Modality) -> ModelSpec:
    return toy_spec(*modalities, name="many", fields={modality: FIELDS[modality] for modality in modalities})


ALL = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
Open = Callable[..., Any]


@pytest.fixture
def open_many(open_words: Open) -> Open:
    def make(cls: type[ModelProcessor] = Processor, modalities: tuple[Modality, ...] = ALL, **settings: Any) -> Any:
        return open_words(cls, spec(*modalities), **settings)

    return make


@functools.cache
def footage(count: int = 40, seed: int = 0, size: tuple[int, int] = (32, 48)) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=Fraction(20))
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        random = np.random.default_rng(seed)
        for _ in range(count):
            levels = np.broadcast_to(random.integers(0, 256, 3, dtype=np.uint8), (*size, 3))
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(levels), format="rgb24")
            out.mux(stream.encode(frame.reformat(format="yuv420p")))
        out.mux(stream.encode(None))
    return file.getvalue()


def png(seed: int) -> bytes:
    return toy.png(seed, 20, 20)


def wav(seed: int, count: int = 4410, rate: int = 4410) -> bytes:
    data = np.random.default_rng(seed).integers(-9000, 9000, count).astype("<i2").tobytes()
    body = (
        b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
        + b"data"
        + struct.pack("<I", len(data))
        + data
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


MEDIA: dict[str, Any] = {
    "images": [png(0), png(1)],
    "videos": [footage(), footage(33, 1)],
    "audios": [wav(0), wav(1, 3000)],
}
PROMPT = "<image> <video> <audio> word <audio> <video> <image>"


# ------------------------------------------------------------------ the whole way


def test_every_kind_through_one_request(open_many: Open) -> None:
    output = open_many().process(PROMPT, **MEDIA)
    rows = [item.num_tokens for item in output.mm_items]
    assert rows == [1, 4, 10, -(-3000 * 10 // 4410), 4, 1]
    first, second = (item for item in output.mm_items if item.modality is Modality.VIDEO)
    assert np.allclose(first.model_specific_data["times"], [0, 0.5, 1, 1.5])
    with av.open(io.BytesIO(footage())) as container:
        levels = [frame.to_ndarray(format="rgb24").mean(axis=(0, 1)) for frame in container.decode(video=0)]
    assert np.allclose(first.feature, np.array(levels)[::10])
    assert second.feature.shape == (4, 3)
    waveforms = [item for item in output.mm_items if item.modality is Modality.AUDIO]
    assert [len(item.feature) for item in waveforms] == [1000, -(-3000 * 1000 // 4410)]


def test_async_gives_the_same(open_many: Open) -> None:
    output = open_many().process(PROMPT, **MEDIA)
    other = asyncio.run(open_many().process_async(PROMPT, **MEDIA))
    assert [item.identity for item in other.mm_items] == [item.identity for item in output.mm_items]
    assert np.array_equal(other.padded_input_ids, output.padded_input_ids)


@pytest.mark.case("9.3")
@pytest.mark.parametrize("step", [1, 3, 7, 39, 40, 100])
def test_count_is_what_process_yields(open_many: Open, step: int) -> None:
    processor = open_many()
    (item,) = processor.process("<video>", videos=[footage()], step=step).mm_items
    size = probe(footage(), modality="video")
    assert isinstance(size, VideoSize)
    assert processor.count("video", size, step=step) == (item.num_tokens, item.num_tokens)
    bare = VideoSize(32, 48, 40, 20.0)
    assert processor.count("video", bare, step=step)[0] == item.num_tokens
    times = item.model_specific_data["times"]
    sampled = SampledVideo(32, 48, np.arange(0, 40, step), times, 20.0 / step)
    assert processor.count("video", sampled)[0] == item.num_tokens == len(times) == len(item.feature)
    assert np.allclose(times, np.arange(0, 40, step) / 20)


@pytest.mark.parametrize(("samples", "rate"), [(4410, 4410), (1, 8000), (48001, 48000), (44099, 44100)])
def test_count_of_an_audio_is_what_process_yields(open_many: Open, samples: int, rate: int) -> None:
    processor = open_many()
    waveform = AudioSamples(np.zeros(samples, np.float32), rate)
    (item,) = processor.process("<audio>", audios=[waveform]).mm_items
    size = probe(waveform, modality="audio")
    assert processor.count("audio", size)[0] == item.num_tokens
    assert processor.count("audio", size.at(1000))[0] == item.num_tokens


def test_sizes_that_are_none(open_many: Open) -> None:
    processor = open_many()
    for modality, size, error in (
        ("video", (10, 10), UsageError),
        ("video", AudioSize(1, 1), UsageError),
        ("audio", VideoSize(1, 1, 1, 1.0), UsageError),
        ("image", VideoSize(1, 1, 1, 1.0), UsageError),
        ("video", VideoSize(1, 1, 0, 1.0), MediaError),
        ("video", VideoSize(1, 1, 1, float("nan")), MediaError),
        ("video", VideoSize(0, 1, 1, 1.0), MediaError),
        ("video", VideoSize(1, 1, 1, float("inf")), MediaError),
        ("video", VideoSize(1, 1, 4, 2.0, np.zeros(2)), UsageError),
        ("video", VideoSize(1, 1, 4.5, 2.0), UsageError),  # type: ignore[arg-type]
        ("video", VideoSize("a", 1, 4, 2.0), UsageError),  # type: ignore[arg-type]
        ("video", VideoSize(1, 1, 10**12, 25.0), LimitError),
        ("video", SampledVideo(1, 1, np.arange(4), np.arange(4.0), 0.0), UsageError),
        ("video", SampledVideo(1, 1, np.zeros(0, np.int64), np.zeros(0), 1.0), MediaError),
        ("video", VideoSize(100_000, 100_000, 1, 1.0), LimitError),
        ("audio", AudioSize(0, 16000), MediaError),
        ("audio", AudioSize(16000, 0), MediaError),
    ):
        with pytest.raises(error):
            processor.count(modality, size)


@pytest.mark.case("9.5")
def test_options_of_one_kind_leave_the_keys_of_others(open_many: Open) -> None:
    processor = open_many()

    def keys(**options: Any) -> list[Any]:
        media = ((Modality.IMAGE, png(0)), (Modality.VIDEO, footage()), (Modality.AUDIO, wav(0)))
        return [processor.prepare_item(modality, value, **options).source_key for modality, value in media]

    plain, video, audio = keys(), keys(step=5), keys(rate=500)
    assert [one == other for one, other in zip(plain, video, strict=True)] == [True, False, True]
    assert [one == other for one, other in zip(plain, audio, strict=True)] == [True, True, False]
    with pytest.raises(UsageError, match="max_pixels"):
        processor.process("<video>", videos=[footage()], max_pixels=1)


def test_a_video_that_was_sampled_is_not_sampled_again(open_many: Open) -> None:
    class Never(Processor):
        def sample(self, size: VideoSize, options: Options) -> Sampling:
            raise AssertionError("sampled again")

    frames = np.zeros((7, 8, 8, 3), np.uint8)
    times = [0.0, 1, 2, 4, 8, 16, 32]
    (item,) = open_many(Never).process("<video>", videos=[VideoFrames(frames, timestamps=times)]).mm_items
    assert item.model_specific_data["times"].tolist() == times
    raw = VideoFrames(frames, fps=1, sampled=False)
    (item,) = open_many().process("<video>", videos=[raw], step=3).mm_items
    assert item.model_specific_data["times"].tolist() == [0, 3, 6]


@pytest.mark.case("4.9")
def test_frames_at_other_rates_are_other_items(open_many: Open) -> None:
    processor = open_many()
    frames = np.zeros((4, 8, 8, 3), np.uint8)
    found = [processor.process("<video>", videos=[VideoFrames(frames, fps=fps)]).mm_items[0] for fps in (1, 30)]
    assert found[0].identity != found[1].identity
    assert found[0].model_specific_data["times"].tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------ once


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Every digest, probe and decode of a media input: what, of which class, in which thread."""
    seen: list[tuple[str, str, int]] = []

    def record(cls: type, name: str) -> None:
        original = getattr(cls, name)

        def recording(self: Any, *arguments: Any, **named: Any) -> Any:
            seen.append((name, cls.__name__, threading.get_ident()))
            return original(self, *arguments, **named)

        monkeypatch.setattr(cls, name, recording)

    for cls in (ImageSource, EncodedVideo, GivenFrames, AudioSource):
        for name in ("digest", "probe", "decode"):
            record(cls, name)
    return seen


def test_a_media_that_is_known_is_neither_probed_nor_decoded(open_many: Open, work: list[Any]) -> None:
    processor = open_many()
    media = {**MEDIA, "videos": [footage(), VideoFrames(np.zeros((4, 8, 8, 3), np.uint8), fps=1)]}
    first = processor.process(PROMPT, **media)
    work.clear()
    second = processor.process(PROMPT, **media)
    assert {name for name, _, _ in work} == {"digest"}
    assert len(work) == 6
    assert np.array_equal(first.padded_input_ids, second.padded_input_ids)


def test_nothing_heavy_runs_on_the_event_loop_s_thread(open_many: Open, work: list[Any]) -> None:
    threads: list[int] = []

    class Telling(Processor):
        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Options) -> Any:
            threads.append(threading.get_ident())
            return super().prepare(decoded, layout, options)

        def sample(self, size: VideoSize, options: Options) -> Sampling:
            threads.append(threading.get_ident())
            return super().sample(size, options)

    processor = open_many(Telling)
    media = {**MEDIA, "videos": [footage(), VideoFrames(np.zeros((4, 8, 8, 3), np.uint8), fps=1)]}
    asyncio.run(processor.process_async(PROMPT, **media))
    here = threading.get_ident()
    assert {name for name, _, _ in work} == {"digest", "probe", "decode"}
    assert {cls for _, cls, _ in work} == {"ImageSource", "EncodedVideo", "GivenFrames", "AudioSource"}
    assert here not in {thread for _, _, thread in work}
    assert here not in threads
    assert len(threads) == 7


# ------------------------------------------------------------------ at the same time


@pytest.mark.case("10.1")
@pytest.mark.parametrize("kind", ["images", "videos", "audios"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_four_items_are_prepared_at_the_same_time(open_many: Open, kind: str, asynchronous: bool) -> None:
    meeting = threading.Barrier(4)  # as many as the executor has threads; alone, each would wait here for ever

    class Meeting(Processor):
        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Options) -> Any:
            meeting.wait(30)
            return super().prepare(decoded, layout, options)

    processor = open_many(Meeting)
    makers: dict[str, Callable[[int], Any]] = {"images": png, "videos": lambda seed: footage(20, seed), "audios": wav}
    media = [makers[kind](seed) for seed in range(4 if not asynchronous else 8)]
    prompt = " ".join([f"<{kind[:-1]}>"] * len(media))
    if asynchronous:
        output = asyncio.run(processor.process_async(prompt, **{kind: media}))
    else:
        # The caller's own thread may take what no other has begun, so five can be at work: four meet in any case.
        output = processor.process(prompt, **{kind: media})
    assert len(output.mm_items) == len(media)


@pytest.mark.case("10.1")
def test_many_distinct_images_in_one_request(open_many: Open, executor: Any) -> None:
    threads: set[int] = set()

    class Telling(Processor):
        def prepare(self, decoded: DecodedMedia, layout: Mapping[str, Any], options: Options) -> Any:
            threads.add(threading.get_ident())
            return super().prepare(decoded, layout, options)

    media = [png(seed) for seed in range(200)]
    output = open_many(Telling, max_images=200).process("<image> " * 200, images=media)
    for seed, item in enumerate(output.mm_items):
        assert np.allclose(item.feature, np.asarray(Image.open(io.BytesIO(media[seed]))).mean(axis=(0, 1)))
    assert len({item.identity for item in output.mm_items}) == 200
    assert len(threads) > 1


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_other_threads_go_on_while_one_decodes(kind: str) -> None:
    """The interpreter's lock is let go of while pixels and samples are decoded."""
    from mm_plugin.media import open_audio, open_image, open_video
    from mm_plugin.settings import Settings

    if kind == "image":
        file = io.BytesIO()
        Image.effect_noise((3000, 3000), 90).convert("RGB").save(file, "JPEG", quality=95)
        source: Any = open_image(file.getvalue(), path="x", settings=Settings())
        work = source.decode
    elif kind == "video":
        source = open_video(footage(30, 3, (720, 1280)), path="x", settings=Settings(threads=1))
        last = SampledVideo(720, 1280, np.array([29]), np.array([1.45]), 1.0)
        work = lambda: list(source.decode(last).frames)  # noqa: E731
    else:
        source = open_audio(wav(0, 3_000_000, 44100), path="x", settings=Settings())
        work = lambda: source.probe(16000)  # noqa: E731
    assert ticks_beside(work) > 100
    assert ticks_beside(lambda: sum(range(3_000_000))) < 50  # what holds the lock lets nobody through


def ticks_beside(work: Callable[[], Any]) -> int:
    """How often another thread gets its turn while this one works and never offers it: only where the work lets go of the lock."""
    began, ended = threading.Event(), threading.Event()
    ticks: list[int] = []

    def count() -> None:
        began.wait(30)
        while not ended.is_set():
            ticks.append(0)
            time.sleep(0)  # offers the turn itself

    other = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    other.start()
    try:
        sys.setswitchinterval(1000)
        began.set()
        for _ in range(5):
            work()
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        other.join(30)
    return len(ticks)


# ------------------------------------------------------------------ what an author may get wrong


def times(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def places(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


WRONG: dict[str, Any] = {
    "too high": Sampling(places(0, 40), times(0, 1), 1.0),
    "below nothing": Sampling(places(-1, 3), times(0, 1), 1.0),
    "descending": Sampling(places(5, 3), times(0, 1), 1.0),
    "int32": Sampling(np.array([0, 1], np.int32), times(0, 1), 1.0),
    "floats": Sampling(times(0, 1), times(0, 1), 1.0),
    "a list": Sampling([0, 1], times(0, 1), 1.0),  # type: ignore[arg-type]
    "two axes": Sampling(places(0, 1)[None], times(0, 1), 1.0),
    "empty": Sampling(places(), times(), 1.0),
    "fewer times": Sampling(places(0, 1), times(0), 1.0),
    "more times": Sampling(places(0), times(0, 1), 1.0),
    "times in a list": Sampling(places(0, 1), [0.0, 1.0], 1.0),  # type: ignore[arg-type]
    "whole times": Sampling(places(0, 1), places(0, 1), 1.0),
    "invalid times": Sampling(places(0, 1), times(0, float("nan")), 1.0),
    "an invalid rate": Sampling(places(0, 1), times(0, 1), float("nan")),
    "an endless rate": Sampling(places(0, 1), times(0, 1), float("inf")),
    "no rate": Sampling(places(0, 1), times(0, 1), 0.0),
    "a word for a rate": Sampling(places(0, 1), times(0, 1), "2"),  # type: ignore[arg-type]
    "nothing for a rate": Sampling(places(0, 1), times(0, 1), None),  # type: ignore[arg-type]
    "indices alone": places(0, 1),
    "nothing": None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sample_is_the_plugin_s_fault(open_many: Open, name: str) -> None:
    class Wrong(Processor):
        def sample(self, size: VideoSize, options: Options) -> Sampling:
            return WRONG[name]

    processor = open_many(Wrong)
    for ask in (
        lambda: processor.process("<video>", videos=[footage()]),
        lambda: processor.count("video", VideoSize(32, 48, 40, 20.0)),
        lambda: processor.prepare_item("video", footage()),
    ):
        with pytest.raises(ProcessorError, match=r"Wrong\.sample must return"):
            ask()


def test_a_sample_that_raises(open_many: Open) -> None:
    class Raising(Processor):
        error: Exception = ValueError("broken")

        def sample(self, size: VideoSize, options: Options) -> Sampling:
            raise self.error

    processor = open_many(Raising)
    with pytest.raises(ProcessorError, match=r"Raising\.sample failed on videos\[0\]"):
        processor.process("<video>", videos=[footage()])
    Raising.error = SizeError("too short for this model")
    with pytest.raises(MediaError, match="too short") as caught:
        processor.process("<video>", videos=[footage()])
    assert caught.value.path == "videos[0]"


@pytest.mark.parametrize("rate", [0, -1, 16000.0, "16000", None, True])
def test_a_wrong_sampling_rate_is_the_plugin_s_fault(open_many: Open, rate: Any) -> None:
    class Wrong(Processor):
        def sampling_rate(self, options: Options) -> int:
            return rate

    with pytest.raises(ProcessorError, match=r"Wrong\.sampling_rate"):
        open_many(Wrong).process("<audio>", audios=[wav(0)])


@pytest.mark.parametrize("modality", [Modality.VIDEO, Modality.AUDIO])
def test_a_declared_kind_needs_its_mixin(open_many: Open, modality: Modality) -> None:
    class Plain(ModelProcessor):
        Options = Options
        context, layout, prepare, replacement = (
            Processor.context,
            Processor.layout,
            Processor.prepare,
            Processor.replacement,
        )

    with pytest.raises(
        ProcessorError, match=f"Plain must subclass Accepts{'Videos' if modality is Modality.VIDEO else 'Audio'}"
    ):
        open_many(Plain, (modality,))


# ------------------------------------------------------------------ limits of a request


@pytest.mark.parametrize("asynchronous", [False, True])
def test_limits_of_a_request_come_before_decoding(open_many: Open, work: list[Any], asynchronous: bool) -> None:
    def fault(prompt: str, media: Mapping[str, Any], **limits: Any) -> LimitError:
        processor = open_many(**limits)
        work.clear()
        ask = (
            (lambda: asyncio.run(processor.process_async(prompt, **media)))
            if asynchronous
            else (lambda: processor.process(prompt, **media))
        )
        with pytest.raises(LimitError) as caught:
            ask()
        assert "decode" not in {name for name, _, _ in work}
        return caught.value

    for kind in ("images", "videos", "audios"):
        error = fault(f"<{kind[:-1]}> " * 2, {kind: MEDIA[kind]}, **{f"max_{kind}": 1})
        assert (error.path, error.setting) == (kind, f"max_{kind}")
    assert fault(PROMPT, MEDIA, max_items=5).setting == "max_items"
    # One frame of 32 x 48 of each video is held at a time.
    both = {"videos": MEDIA["videos"]}
    error = fault("<video> <video>", both, max_request_pixels=2 * 32 * 48 - 1)
    assert (error.setting, error.value) == ("max_request_pixels", 2 * 32 * 48)
    open_many(max_request_pixels=2 * 32 * 48).process("<video> <video>", **both)
    assert fault("<video>", {"videos": [footage()]}, max_video_frames=39).path == "videos[0]"
    assert fault("<video>", {"videos": [footage()]}, max_item_tokens=3).path == "videos[0]"


def test_a_kind_that_the_model_does_not_take_is_refused(open_many: Open) -> None:
    processor = open_many(modalities=(Modality.IMAGE,))
    with pytest.raises(RequestError, match="not videos"):
        processor.process("word", videos=[footage()])
    with pytest.raises(RequestError, match="not audios"):
        processor.process("word", audios=[wav(0)])


def test_a_broken_video_is_found_while_it_is_prepared(open_many: Open) -> None:
    frames = VideoFrames([png(0), png(1)[:-40]], fps=1)  # its head is whole
    for ask in (open_many().process, lambda *a, **k: asyncio.run(open_many().process_async(*a, **k))):
        with pytest.raises(MediaError) as caught:
            ask("<video> <video>", videos=[footage(), frames])
        assert caught.value.path == "videos[1]"


# ------------------------------------------------------------------ what is held, and what is counted before it is touched


@pytest.mark.parametrize("as_async", [False, True], ids=["sync", "async"])
def test_a_request_that_failed_holds_none_of_its_media(open_many: Open, as_async: bool) -> None:
    processor = open_many()
    prompt = "<video> <video>"

    async def fail(media: list[Any]) -> None:
        with contextlib.suppress(MediaError):
            if as_async:
                await processor.process_async(prompt, videos=media)
            else:
                processor.process(prompt, videos=media)

    async def main() -> bool:
        array = np.zeros((4, 8, 8, 3), np.uint8)
        held = weakref.ref(array)
        await fail([VideoFrames(array, fps=1.0), b"bad" * 50])
        del array
        for _ in range(50):  # a thread that ends its work may hold it a moment longer
            if held() is None:
                break
            await asyncio.sleep(0.05)
        return held() is not None

    gc.collect()
    gc.disable()
    try:
        assert not asyncio.run(main())
    finally:
        gc.enable()


def test_pixels_of_objects_are_counted_over_a_request_before_any_is_touched(open_many: Open) -> None:
    processor = open_many(max_request_pixels=1_500)
    file = io.BytesIO()
    Image.new("RGB", (20, 20)).save(file, "PNG")
    lazy = [Image.open(io.BytesIO(file.getvalue())) for _ in range(4)]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("<video>", {"videos": [VideoFrames(lazy, fps=2.0)]}),
        ("<image> " * 4, {"images": lazy}),
        ("<video> " * 4, {"videos": [VideoFrames(np.zeros((1, 20, 20, 3), np.uint8), fps=2.0)] * 4}),
    ]
    for prompt, media in requests:
        with pytest.raises(LimitError) as caught:
            processor.process(prompt, **media)
        assert caught.value.setting == "max_request_pixels"
    assert all(image._im is None for image in lazy)


@pytest.mark.parametrize("sampled", [np.zeros(2), [object()], "x", 1, None], ids=lambda value: type(value).__name__)
def test_whether_frames_were_chosen_is_true_or_false(open_many: Open, sampled: Any) -> None:
    frames = VideoFrames(np.zeros((2, 8, 8, 3), np.uint8), fps=2.0, sampled=sampled)
    with pytest.raises(MediaError, match="sampled must be True or False"):
        open_many().process("<video>", videos=[frames])


def test_a_frame_has_no_url_of_its_own(open_many: Open) -> None:
    frames = VideoFrames(["http://a.example/1.png", "http://a.example/2.png"], fps=2.0)
    with pytest.raises(MediaError) as caught:
        open_many(allowed_hosts=("a.example",)).process("<video>", videos=[frames])
    assert caught.value.reason == "url"
