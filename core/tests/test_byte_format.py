"""The published byte format: every tag and every formula of docs/identity-and-caching.md, by a second implementation.

`slow_frame` is written from the page alone and shares nothing with `mm_plugin.identity`. It reads values as vectors.json writes
them, so that the vectors can be checked in any language.
"""

from __future__ import annotations

import enum
import inspect
import io
import json
import re
import struct
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from toy import Toy, toy_spec

from mm_plugin import identity
from mm_plugin.checkpoint import Checkpoint
from mm_plugin.identity import (
    FORMAT_VERSION,
    caller_identity,
    deferred_identity,
    digest,
    feature_digest,
    frame,
    framing,
    item_identity,
    source_key,
)
from mm_plugin.inputs import PrecomputedEmbeddings
from mm_plugin.items import Modality
from mm_plugin.media import AudioSamples, VideoFrames, open_audio, open_image, open_video
from mm_plugin.placeholders import Replacement
from mm_plugin.processor import AcceptsPrecomputed
from mm_plugin.settings import Settings

PUBLISHED: dict[str, Any] = json.loads(Path(str(resources.files("mm_plugin.identity") / "vectors.json")).read_text())


def hexed(value: Any, key: str) -> Any:
    """One part of a vector that is written as {key: value}, or None."""
    return value[key] if isinstance(value, dict) and set(value) == {key} else None


def slow_frame(value: Any) -> bytes:
    """The frame of a value as vectors.json writes it, from the description of the format alone."""

    def sized(tag: str, data: bytes) -> bytes:
        return tag.encode() + len(data).to_bytes(8, "big") + data

    if value is None:
        return b"N"
    if type(value) is bool:
        return b"T" if value else b"F"
    if type(value) is int:
        digits = f"{abs(value):x}" if value else ""
        magnitude = bytes.fromhex(digits.rjust(len(digits) + len(digits) % 2, "0"))
        return (b"i-" if value < 0 else b"i+") + len(magnitude).to_bytes(8, "big") + magnitude
    if type(value) is str:
        return sized("s", value.encode())
    if type(value) is list:
        return b"l" + len(value).to_bytes(8, "big") + b"".join(map(slow_frame, value))
    if (found := hexed(value, "float")) is not None:
        return b"f" + struct.pack(">d", float.fromhex(found))
    if (found := hexed(value, "bytes")) is not None:
        return sized("b", bytes.fromhex(found))
    if (found := hexed(value, "mapping")) is not None:
        pairs = sorted([slow_frame(key), slow_frame(part)] for key, part in found)
        return b"d" + len(pairs).to_bytes(8, "big") + b"".join(key + part for key, part in pairs)
    if (found := hexed(value, "array")) is not None:
        return b"a" + slow_digest(found["dtype"], found["shape"], bytes.fromhex(found["raw"]))
    if (found := hexed(value, "enum")) is not None:
        return b"e" + slow_frame(found)
    if (found := hexed(value, "struct")) is not None:
        return b"m" + slow_frame([found["tag"], {"mapping": found["fields"]}])
    if (found := hexed(value, "pil")) is not None:
        inner = [found["palette"], found["transparency"], {"bytes": blake3(bytes.fromhex(found["raw"])).hexdigest()}]
        return b"p" + slow_frame([found["mode"], found["width"], found["height"], *inner])
    raise AssertionError(f"the vectors say nothing of {value}")


def slow_digest(dtype: str, shape: list[int], raw: bytes) -> bytes:
    inner = {"bytes": blake3(raw).hexdigest()}
    return blake3(slow_frame([dtype, shape, inner])).digest()


def real(value: Any) -> Any:
    """The value for which vectors.json writes this."""
    if isinstance(value, list):
        return [real(part) for part in value]
    if (found := hexed(value, "float")) is not None:
        return float.fromhex(found)
    if (found := hexed(value, "bytes")) is not None:
        return bytes.fromhex(found)
    if (found := hexed(value, "mapping")) is not None:
        return {real(key): real(part) for key, part in found}
    if (found := hexed(value, "array")) is not None:
        raw = bytearray.fromhex(found["raw"])
        dtype = getattr(torch, found["dtype"])
        return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(found["shape"])
    if (found := hexed(value, "enum")) is not None:
        name, held = found[0], real(found[1])
        return enum.Enum("Any", {"OTHER": "other", name: held})[name]
    if (found := hexed(value, "struct")) is not None:
        fields = {name: real(part) for name, part in found["fields"]}
        made = msgspec.defstruct("Any", list(fields), tag=found["tag"])
        return made(**fields)
    if (found := hexed(value, "pil")) is not None:
        image = Image.frombytes(found["mode"], (found["width"], found["height"]), bytes.fromhex(found["raw"]))
        if found["palette"] is not None:
            image.putpalette(bytes.fromhex(found["palette"]["bytes"]), "RGBA")
        if found["transparency"] is not None:
            transparency = real(found["transparency"])
            image.info["transparency"] = tuple(transparency) if isinstance(transparency, list) else transparency
        return image
    return value


def test_the_vectors_are_of_this_format_and_of_every_kind() -> None:
    assert PUBLISHED["format_version"] == FORMAT_VERSION == 1
    assert identity.test_vectors() == PUBLISHED
    tags = {bytes.fromhex(entry["frame"])[:1] for entry in PUBLISHED["frames"]}
    assert tags == {tag.encode() for tag in "NTFifsbldeamp"}
    assert min(len(PUBLISHED[name]) for name in PUBLISHED if name not in ("format_version", "about")) >= 2


def test_the_page_lists_every_tag_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "identity-and-caching.md").read_text()
    table = page[page.index("## The byte format") :]
    rows = {
        tag for line in table.splitlines() if line.startswith("| `") for tag in re.findall("`(.)`", line.split("|")[1])
    }
    code = inspect.getsource(framing)
    assert rows == set(re.findall(r'b"([A-Za-z])', code)) == set("NTFifsbldeamp")


@pytest.mark.parametrize("entry", PUBLISHED["blake3"], ids=lambda entry: str(entry["length"]))
def test_published_digests_are_those_of_blake3(entry: dict[str, Any]) -> None:
    data = bytes(index % 251 for index in range(entry["length"]))
    assert entry["digest"] == blake3(data).hexdigest() == digest(data).hex()


@pytest.mark.parametrize("entry", PUBLISHED["frames"], ids=lambda entry: json.dumps(entry["value"])[:40])
def test_published_frames_are_those_of_the_description_and_of_the_code(entry: dict[str, Any]) -> None:
    assert entry["frame"] == slow_frame(entry["value"]).hex() == frame(real(entry["value"])).hex()
    array = hexed(entry["value"], "array")
    if array is not None:
        found = feature_digest(real(entry["value"]))
        assert found == slow_digest(array["dtype"], array["shape"], bytes.fromhex(array["raw"]))


@pytest.mark.parametrize("entry", PUBLISHED["identities"], ids=lambda entry: str(entry["salt"]))
def test_published_identities_are_those_of_the_description_and_of_the_code(entry: dict[str, Any]) -> None:
    names = ("spec_name", "output_version", "modality", "format")
    parts = ["mm-plugin/item", 1, *(entry[name] for name in names), {"bytes": entry["feature"]}]
    assert entry["identity"] == blake3(slow_frame([*parts, entry["fields"], entry["salt"]])).hexdigest()
    feature, fields = bytes.fromhex(entry["feature"]), real(entry["fields"])
    made = item_identity(*(entry[name] for name in names), feature, fields, salt=real(entry["salt"]))
    assert entry["identity"] == made.hex()


@pytest.mark.parametrize("entry", PUBLISHED["source_keys"], ids=lambda entry: str(entry["context"]))
def test_published_source_keys_are_those_of_the_description_and_of_the_code(entry: dict[str, Any]) -> None:
    names = ("spec_name", "output_version", "modality")
    options = blake3(slow_frame(entry["options"])).digest()
    parts = ["mm-plugin/source", 1, *(entry[name] for name in names), {"bytes": entry["source"]}]
    by_hand = blake3(
        slow_frame([*parts, {"bytes": options.hex()}, entry["context"], {"bytes": entry["model"]}, entry["salt"]])
    ).hexdigest()
    own = digest(frame(real(entry["options"])))
    made = source_key(
        *(entry[name] for name in names),
        bytes.fromhex(entry["source"]),
        own,
        real(entry["context"]),
        model=bytes.fromhex(entry["model"]),
        salt=real(entry["salt"]),
    )
    assert own == options
    assert entry["key"] == by_hand == made.hex()


@pytest.mark.parametrize("entry", PUBLISHED["callers"], ids=lambda entry: str(entry["salt"]))
def test_published_identities_of_callers_are_those_of_the_description_and_of_the_code(entry: dict[str, Any]) -> None:
    names = ("spec_name", "output_version", "modality")
    options, value = blake3(slow_frame(entry["options"])).digest(), int(entry["hash"], 16)
    parts = ["mm-plugin/caller", 1, *(entry[name] for name in names), value, {"bytes": options.hex()}]
    by_hand = blake3(slow_frame([*parts, entry["context"], entry["salt"]])).hexdigest()
    made = caller_identity(*(entry[name] for name in names), value, options, None, salt=entry["salt"])
    assert entry["identity"] == by_hand == made.hex()


@pytest.mark.parametrize("entry", PUBLISHED["deferred"], ids=lambda entry: entry["spec_name"])
def test_published_identities_of_what_is_prepared_elsewhere(entry: dict[str, Any]) -> None:
    names = ("spec_name", "output_version", "modality")
    key = bytes.fromhex(entry["source_key"])
    parts = ["mm-plugin/deferred", 1, *(entry[name] for name in names), {"bytes": entry["source_key"]}]
    by_hand = blake3(slow_frame(parts)).hexdigest()
    assert entry["identity"] == by_hand == deferred_identity(*(entry[name] for name in names), key).hex()


@pytest.mark.parametrize("entry", PUBLISHED["sources"], ids=lambda entry: entry["parts"][0])
def test_published_digests_of_sources_are_those_of_the_description_and_of_the_code(entry: dict[str, Any]) -> None:
    assert entry["digest"] == blake3(slow_frame(entry["parts"])).hexdigest()
    assert entry["digest"] == digest(frame([real(part) for part in entry["parts"]])).hex()


@pytest.mark.parametrize("entry", PUBLISHED["models"], ids=lambda entry: str(len(entry["pairs"])))
def test_published_digests_of_models_are_those_of_the_description_and_of_the_code(entry: dict[str, Any]) -> None:
    parts = [entry["config"], entry["placeholders"], entry["pairs"]]
    assert entry["digest"] == blake3(slow_frame(parts)).hexdigest() == digest(frame(real(parts))).hex()


@pytest.mark.parametrize("entry", PUBLISHED["caller_embeddings"], ids=lambda entry: str(entry["salt"]))
def test_published_names_of_embeddings_are_those_of_the_description_and_of_the_code(entry: dict[str, Any]) -> None:
    parts = ["caller-rows", {"bytes": entry["identity"]}, entry["salt"]]
    assert entry["content"] == blake3(slow_frame(parts)).hexdigest() == digest(frame(real(parts))).hex()


@pytest.mark.parametrize("entry", PUBLISHED["checkpoints"], ids=lambda entry: str(len(entry["tensors"]["mapping"])))
def test_published_fingerprints_are_those_of_the_description_and_of_the_code(entry: dict[str, Any]) -> None:
    parts = ["mm-plugin/checkpoint", 1, *(entry[name] for name in ("config", "settings", "names", "tensors"))]
    assert entry["fingerprint"] == blake3(slow_frame(parts)).hexdigest() == digest(frame(real(parts))).hex()


def written(value: Any) -> Any:
    """A value as vectors.json would write it."""
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return [written(part) for part in value]
    if isinstance(value, dict):
        return {"mapping": [[written(key), written(part)] for key, part in value.items()]}
    if isinstance(value, enum.Enum):
        return {"enum": [value.name, written(value.value)]}
    if isinstance(value, msgspec.Struct):
        fields = [[name, written(part)] for name, part in msgspec.structs.asdict(value).items()]
        return {"struct": {"tag": value.__struct_config__.tag, "fields": fields}}
    return value


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
names = st.text("abc", min_size=1, max_size=3)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(
            lambda name, held: enum.Enum("Any", {name: held})[name], names, scalars.filter(lambda v: v is not None)
        )
        | st.builds(
            lambda fields, tag: msgspec.defstruct("Any", list(fields), tag=tag)(**fields),
            st.dictionaries(names, inner, max_size=2),
            st.none() | st.integers(0, 9) | st.text(max_size=2),
        )
    ),
    max_leaves=6,
)


@given(values)
def test_any_frame_equals_a_slow_one(value: Any) -> None:
    assert frame(value) == slow_frame(written(value))


def test_a_class_that_moves_or_is_renamed_keeps_its_frames() -> None:
    one = enum.Enum("Color", {"RED": 1, "BLUE": 2}, module="a")
    other = enum.Enum("Color", {"RED": 1, "BLUE": 2}, module="b.c")
    assert frame(one.RED) == frame(other.RED) != frame(one.BLUE)
    first = msgspec.defstruct("Rule", [("sigma", float)], module="a")(0.5)
    second = msgspec.defstruct("Blur", [("sigma", float)], module="b.c")(0.5)
    assert frame(first) == frame(second)
    blur, sharpen = (msgspec.defstruct(name, [("sigma", float)], tag=True)(0.5) for name in ("Blur", "Sharpen"))
    assert len({frame(value) for value in (first, blur, sharpen)}) == 3


# ------------------------------------------------------------------ sources


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def array(value: np.ndarray) -> dict[str, Any]:
    return {"array": {"dtype": value.dtype.name, "shape": list(value.shape), "raw": value.tobytes().hex()}}


def hashed(*parts: Any) -> bytes:
    """`digest(frame([...]))`, by the second implementation."""
    return blake3(slow_frame(list(parts))).digest()


def as_bytes(value: bytes) -> dict[str, str]:
    return {"bytes": value.hex()}


PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
TIMES, RATE = np.array([0.0, 0.5]), 2.0


def opened(open_one: Any, value: Any) -> bytes:
    return open_one(value, path="media[0]", settings=Settings()).digest()  # type: ignore[no-any-return]


def slow_feature(value: np.ndarray) -> dict[str, str]:
    return as_bytes(slow_digest(value.dtype.name, list(value.shape), value.tobytes()))


def test_the_source_of_an_encoded_file_is_its_bytes() -> None:
    data = png(PIXELS)
    expected = hashed("bytes", as_bytes(blake3(data).digest()))
    assert opened(open_image, data) == expected


def test_the_source_of_pixels_is_their_feature_digest() -> None:
    assert opened(open_image, PIXELS) == hashed("pixels", slow_feature(PIXELS))


@pytest.mark.parametrize("orientation", [1, 6])
def test_the_source_of_a_pil_image_is_its_frame_and_its_orientation(orientation: int) -> None:
    image = Image.fromarray(PIXELS)
    image.getexif()[0x0112] = orientation
    pil = {"mode": "RGB", "width": 4, "height": 2, "palette": None, "transparency": None, "raw": PIXELS.tobytes().hex()}
    assert opened(open_image, image) == hashed("pil", {"pil": pil}, orientation)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_source_of_frames_is_their_content_times_rate_and_whether_they_were_sampled(sampled: bool) -> None:
    video = np.stack([PIXELS, PIXELS + 1])
    made = VideoFrames(video, fps=RATE, sampled=sampled)
    expected = hashed("frames", slow_feature(video), array(TIMES), {"float": RATE.hex()}, sampled)
    assert opened(open_video, made) == expected
    images = VideoFrames([Image.fromarray(frame) for frame in video], fps=RATE, sampled=sampled)
    each = [as_bytes(opened(open_image, Image.fromarray(frame))) for frame in video]
    assert opened(open_video, images) == hashed("frames", each, array(TIMES), {"float": RATE.hex()}, sampled)


def test_the_source_of_samples_is_their_content_and_rate() -> None:
    samples = np.linspace(-1, 1, 8, dtype=np.float32)
    assert opened(open_audio, AudioSamples(samples, 16_000)) == hashed("samples", slow_feature(samples), 16_000)


# ------------------------------------------------------------------ a request


class Precomputed(AcceptsPrecomputed, Toy):
    """A toy whose media inputs may come prepared, with one field and a context that is a mapping."""

    def context(self, counts: Mapping[Modality, int]) -> dict[str, bool]:
        return {"many": counts[Modality.IMAGE] > 2}

    def layout(self, modality: Modality, size: Any, options: Any, context: Any) -> dict[str, Any]:
        return {"rows": size.height}

    def replacement(self, layout: Mapping[str, Any]) -> Replacement:
        return Replacement.repeat(self.special_tokens.placeholders[Modality.IMAGE], layout["rows"])

    def check_fields(self, modality: Modality, fields: Mapping[str, Any]) -> int:
        return int(fields["rows"])

    def check_feature(self, modality: Modality, feature: Any, fields: Mapping[str, Any]) -> None:
        pass


SPEC = toy_spec(
    name="rows",
    output_version=4,
    token_pairs=(("<start>", "<end>"),),
    fields={Modality.IMAGE: ("rows",)},
    feature_names={Modality.IMAGE: "pixel_values"},
    padding="pairs",
)
CONTEXT = {"mapping": [["many", False]]}
FIELDS = {"mapping": [["rows", 2]]}


def slow_options(tone: int) -> bytes:
    """Of the options that change an image: `pitch` is not among them."""
    return blake3(slow_frame({"mapping": [["tone", tone], ["background", [255, 255, 255]]]})).digest()


@pytest.fixture
def processor(open_words: Callable[..., Any]) -> Any:
    return open_words(Precomputed, SPEC, ("<image>", "<start>", "<end>"))


def slow_model(processor: Any) -> bytes:
    token = processor.checkpoint.tokenizer.get_vocab()
    config = {"mapping": [["vocab_size", 9]]}
    placeholders = {"mapping": [[1, token["<image>"]]]}
    return hashed(config, placeholders, [[token["<start>"], token["<end>"]]])


@pytest.mark.parametrize("salt", [None, "tenant", b"\x00"], ids=str)
def test_source_key_and_identity_of_a_request_follow_the_page(processor: Any, salt: Any) -> None:
    data = png(PIXELS)
    kept = as_bytes(salt) if isinstance(salt, bytes) else salt
    source = hashed("bytes", as_bytes(blake3(data).digest()))
    found = processor.prepare_item("image", data, tone=5, salt=salt)
    head = ("mm-plugin/source", 1, "rows", 4, 1)
    model = as_bytes(slow_model(processor))
    assert found.source_key == hashed(*head, as_bytes(source), as_bytes(slow_options(5)), CONTEXT, model, kept)
    feature = slow_feature(PIXELS.astype(np.int16) + 5)
    assert found.identity == hashed("mm-plugin/item", 1, "rows", 4, 1, "normal", feature, FIELDS, kept)
    output = processor.process("<image>", [data], tone=5, salt=salt)
    assert output.mm_items[0].identity == found.identity


@pytest.mark.parametrize("salt", [None, "tenant"], ids=str)
def test_the_identity_after_a_callers_hash_follows_the_page(processor: Any, salt: Any) -> None:
    output = processor.process("<image>", [png(PIXELS)], mm_hashes=["a1b2"], salt=salt)
    head = ("mm-plugin/caller", 1, "rows", 4, 1)
    assert output.mm_items[0].identity == hashed(*head, 0xA1B2, as_bytes(slow_options(0)), CONTEXT, salt)


@pytest.mark.parametrize("salt", [None, "tenant"], ids=str)
def test_the_identity_of_precomputed_embeddings_follows_the_page(processor: Any, salt: Any) -> None:
    rows = np.ones((2, 4), np.float32)
    head = ("mm-plugin/item", 1, "rows", 4, 1, "precomputed_embedding")
    output = processor.process("<image>", [PrecomputedEmbeddings(rows, {"rows": 2})], salt=salt)
    assert output.mm_items[0].identity == hashed(*head, slow_feature(rows), FIELDS, salt)
    named = hashed("caller-rows", as_bytes(b"n" * 32), salt)
    output = processor.process("<image>", [PrecomputedEmbeddings(rows, {"rows": 2}, identity=b"n" * 32)], salt=salt)
    assert output.mm_items[0].identity == hashed(*head, as_bytes(named), FIELDS, salt)


# ------------------------------------------------------------------ checkpoints


def test_the_fingerprint_of_a_checkpoint_follows_the_page(tmp_path: Path) -> None:
    weights = {"visual.a": torch.arange(3.0), "lm_head": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "x", "sizes": [1, 2.5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = b'{"image_std": [0.5]}'
    (tmp_path / "preprocessor_config.json").write_bytes(settings)
    described = {"mapping": [["model_type", "x"], ["sizes", [1, {"float": (2.5).hex()}]]]}
    files = {"mapping": [["preprocessor_config.json", as_bytes(blake3(settings).digest())]]}
    visual = slow_digest("float32", [3], struct.pack("<3f", 0, 1, 2))
    head = slow_digest("bfloat16", [2], bytes(4))
    tensors = {"visual.a": as_bytes(visual), "lm_head": as_bytes(head)}

    def expected(*names: str) -> str:
        parts = {"mapping": [[name, tensors[name]] for name in names]}
        return hashed("mm-plugin/checkpoint", 1, described, files, sorted(tensors), parts).hex()

    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.fingerprint() == expected("visual.a", "lm_head")
    assert checkpoint.fingerprint(["visual.a"]) == expected("visual.a")
