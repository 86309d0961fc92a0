"""Which structs travel, field by field, and what each field may be. A struct whose fields are not all here cannot be imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec
import numpy as np

from mm_plugin import errors
from mm_plugin.arrays import is_dense, is_tensor
from mm_plugin.errors import MMPluginError, PluginError, RequestError, UsageError
from mm_plugin.events import MediaNote
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.inputs.processed import (
    ItemContent,
    MultimodalInputs,
    MultimodalProcessorOutput,
    PromptUsage,
    SpecialTokens,
)
from mm_plugin.items import (
    ITEM_KEY_BYTES,
    Attention,
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    are_notes,
    checked_spans,
)
from mm_plugin.media.source import MediaValue
from mm_plugin.media.types import (
    AudioSamples,
    AudioSize,
    PackedImage,
    SampledVideo,
    Sampling,
    Size,
    VideoFrames,
    is_sampling,
)
from mm_plugin.placeholders import Replacement
from mm_plugin.tasks import JointPrepared, JointTask, ModelRef, Prepared, PrepareTask
from mm_plugin.wire.values import StructRule

Check = Callable[[Any], bool]
_LARGEST = 1 << 48  # tokens, pixels, frames: far above any, and small enough for every sum


# ---------------------------------------------------------------- what a field may be


def _whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value < high


def _of(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _each(check: Check, container: type | tuple[type, ...] = list) -> Check:
    return lambda value: isinstance(value, container) and all(check(part) for part in value)  # type: ignore[attr-defined]


def _bytes(length: int) -> Check:
    return lambda value: isinstance(value, bytes) and len(value) == length


def _array(dtype: type, *shape: int | None) -> Check:
    def check(value: Any) -> bool:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != len(shape):
            return False
        return all(side is None or side == found for side, found in zip(shape, value.shape, strict=True))

    return check


def _mapping(key: Check, part: Check) -> Check:
    return lambda value: isinstance(value, Mapping) and all(key(one) and part(two) for one, two in value.items())


def _span(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_count, value)) and value[0] <= value[1]


def _sentinels(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 4 and all(type(part) is int for part in value)


def _dense_or_none(value: Any) -> bool:
    return value is None or is_dense(value)


def _anything(value: Any) -> bool:  # noqa: ARG001 - the check of a field that an author defines
    return True


def _pair(first: Check, second: Check) -> Check:
    return lambda value: isinstance(value, tuple) and len(value) == 2 and first(value[0]) and second(value[1])


_count, _text, _flag = _whole(0, _LARGEST), _of(str), _of(bool)
_int64 = _whole(-(1 << 63), 1 << 63)
_number = _of(int, float)
_ids = _array(np.int64, None)
_fields = _mapping(_text, _anything)
_modality = _of(Modality)


def _is_pixels(value: Any) -> bool:
    return isinstance(value, bytes | PackedImage | np.ndarray) or is_tensor(value)


def _is_media(value: Any) -> bool:
    return isinstance(value, VideoFrames | AudioSamples) or _is_pixels(value)


def _is_frames(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_tensor(value) or _each(_is_pixels, (list, tuple))(value)


def _is_feature(value: Any) -> bool:
    return value is None or isinstance(value, np.ndarray) or is_tensor(value)


# ---------------------------------------------------------------- structs whose parts must fit one another


def _request(cls: type) -> Callable[[dict[str, Any]], Any]:
    """Makes an output or inputs whose ids are of one length and hold every span."""

    def make(fields: dict[str, Any]) -> Any:
        length = len(fields["input_ids"])
        lengths = {len(fields[name]) for name in ("input_ids", "padded_input_ids", "token_modalities")}
        positions = fields["mrope_positions"]
        if lengths != {length} or (positions is not None and positions.shape != (3, length)):
            raise UsageError("ids, token modalities and positions of different lengths", argument="frames")
        checked_spans(fields["mm_items"], length)
        return cls(**fields)

    return make


def _replacement(fields: dict[str, Any]) -> Replacement:
    if fields["is_embed"] is not None and fields["is_embed"].shape != fields["ids"].shape:
        raise UsageError("ids and is_embed of different lengths", argument="frames")
    return Replacement(**fields)


_SIZES: Mapping[Modality, type] = {Modality.IMAGE: Size, Modality.VIDEO: SampledVideo, Modality.AUDIO: AudioSize}


def _plain_options(options: Any) -> Any:
    """An author's options as plain values, of which `Processor.prepare_tasks` makes them again."""
    if isinstance(options, Mapping):  # as they came from another process
        return options
    try:
        made: Any = msgspec.to_builtins(options, builtin_types=(bytes,))
        same: bool = msgspec.convert(made, type(options)) == options
    except (TypeError, ValueError):
        same = False
    if same:
        return made
    raise UsageError(f"value: options of {type(options).__name__} cannot be sent as plain values", argument="value")


def _sampled_video(fields: dict[str, Any]) -> SampledVideo:
    if not is_sampling(Sampling(fields["indices"], fields["timestamps"], fields["fps"], fields["notes"]), _LARGEST):
        raise UsageError("expected ascending frames with a finite time each, and a positive fps", argument="frames")
    return SampledVideo(**fields)


def _task_fields(task: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(task)
    source = MediaValue(task.source.path, task.source.value())
    return fields | {"source": source, "options": _plain_options(task.options)}


def _task(fields: dict[str, Any]) -> PrepareTask:
    if not isinstance(fields["size"], _SIZES[fields["modality"]]):
        raise UsageError("a size of another modality", argument="frames")
    return PrepareTask(**fields)


def _joint_fields(task: Any) -> dict[str, Any]:
    sources = {
        modality: [(MediaValue(source.path, source.value()), size) for source, size in entries]
        for modality, entries in task.sources.items()
    }
    return msgspec.structs.asdict(task) | {"sources": sources, "options": _plain_options(task.options)}


def _joint_task(fields: dict[str, Any]) -> JointTask:
    for modality, entries in fields["sources"].items():
        if not all(isinstance(size, _SIZES[modality]) for _, size in entries):
            raise UsageError("a size of another modality", argument="frames")
    return JointTask(**fields)


def _is_entry(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], MediaValue)


_ERRORS = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, RequestError | PluginError | UsageError)
}


def _error_fields(error: MMPluginError) -> dict[str, Any]:
    """The class of an error (of a plugin's own, the core's class above it), its message and its plain attributes."""
    cls = next((base for base in type(error).__mro__ if _ERRORS.get(base.__name__) is base), None)
    if cls is None:
        raise UsageError(f"value: a {type(error).__name__} cannot be sent", argument="value")
    attributes = {name: getattr(error, name, None) for name in cls.attributes}
    plain = {name: value if isinstance(value, str | int | float | None) else None for name, value in attributes.items()}
    return {"name": cls.__name__, "message": error.message, "attributes": plain}


def _error(fields: dict[str, Any]) -> MMPluginError:
    return _ERRORS[fields["name"]](fields["message"], **fields["attributes"])


# ---------------------------------------------------------------- the table

ENUMS = {"modality": Modality, "format": MultimodalInputFormat}

_OUTPUT: dict[str, Check] = {
    "input_ids": _ids,
    "padded_input_ids": _ids,
    "token_modalities": _ids,
    "mm_items": _each(_of(MultimodalDataItem)),
    "special_tokens": _of(SpecialTokens),
    "mrope_positions": _or_none(_array(np.int64, 3, None)),
    "mrope_position_delta": _or_none(_int64),
    "position_options": _fields,
}

RULES: Mapping[str, StructRule] = {
    "item": StructRule(
        MultimodalDataItem,
        {
            "modality": _modality,
            "hash": _or_none(_whole(0, 1 << 64)),
            "pad_value": _or_none(_int64),
            "offsets": _each(_span),
            "format": _of(MultimodalInputFormat),
            "feature": _is_feature,
            "task": _or_none(_of(PrepareTask)),
            "precomputed_embeddings": _dense_or_none,
            "keep_device_embedding": _flag,
            "model_specific_data": _fields,
            "identity": _or_none(_bytes(32)),
            "pad_values": _or_none(_sentinels),
            "attention": lambda value: value in get_args(Attention),
            "notes": are_notes,
        },
    ),
    "special_tokens": StructRule(
        SpecialTokens,
        {
            "placeholders": _mapping(_modality, _count),
            "pairs": _each(_pair(_count, _count), tuple),
        },
    ),
    "output": StructRule(
        MultimodalProcessorOutput,
        {**_OUTPUT, "dropped": _each(_text, tuple), "usage": _of(PromptUsage)},
        from_fields=_request(MultimodalProcessorOutput),
    ),
    "usage": StructRule(PromptUsage, dict.fromkeys(("text", "image", "video", "audio"), _count)),
    "inputs": StructRule(
        MultimodalInputs,
        {
            **_OUTPUT,
            "num_image_tokens": _count,
            "num_video_tokens": _count,
            "num_audio_tokens": _count,
            "num_dropped": _count,
        },
        from_fields=_request(MultimodalInputs),
    ),
    "content": StructRule(
        ItemContent,
        {
            "key": _bytes(ITEM_KEY_BYTES),
            "feature": _is_feature,
            "precomputed_embeddings": _dense_or_none,
            "task": _or_none(_of(PrepareTask)),
        },
    ),
    "media": StructRule(MediaValue, {"path": _text, "media": _is_media}),
    "packed_image": StructRule(
        PackedImage,
        {
            "mode": _text,
            "width": _count,
            "height": _count,
            "data": _of(bytes),
            "palette": _or_none(_pair(_text, _of(bytes))),
            "transparency": lambda value: value is None or _of(int, bytes)(value) or _each(_int64, tuple)(value),
            "orientation": _whole(1, 9),
            "levels": _pair(_whole(1, 33), _flag),
            "file_palette": _or_none(_of(bytes)),
            "frame": lambda value: value is None or (_each(_count, tuple)(value) and len(value) == 4),
            "is_bitmap": _flag,
        },
    ),
    "video_frames": StructRule(
        VideoFrames, {"frames": _is_frames, "fps": _or_none(_number), "timestamps": _anything, "sampled": _flag}
    ),
    "audio_samples": StructRule(AudioSamples, {"samples": _anything, "sampling_rate": _whole(1, 1 << 32)}),
    "task": StructRule(
        PrepareTask,
        {
            "model": _of(ModelRef),
            "modality": _modality,
            "path": _text,
            "source": _of(MediaValue),
            "size": _of(*_SIZES.values()),
            "options": _fields,
            "fields": _fields,
            "replacement": _of(Replacement),
            "salt": _or_none(_of(str, bytes)),
            "notes": are_notes,
        },
        to_fields=_task_fields,
        from_fields=_task,
    ),
    "joint_task": StructRule(
        JointTask,
        {
            "model": _of(ModelRef),
            "text": _text,
            "rendered": _flag,
            "sources": _mapping(_modality, _each(_is_entry)),
            "options": _fields,
            "salt": _or_none(_of(str, bytes)),
        },
        to_fields=_joint_fields,
        from_fields=_joint_task,
    ),
    "replacement": StructRule(
        Replacement, {"ids": _ids, "is_embed": _or_none(_array(np.bool_, None))}, from_fields=_replacement
    ),
    "prepared": StructRule(
        Prepared,
        {
            "fields": _fields,
            "replacement": _of(Replacement),
            "feature": _is_feature,
            "identity": _bytes(32),
            "format": _of(MultimodalInputFormat),
            "embeddings": _dense_or_none,
            "seconds": _number,
            "notes": are_notes,
        },
    ),
    "joint_prepared": StructRule(
        JointPrepared,
        {
            "ids": _ids,
            "items": _each(_of(MultimodalDataItem)),
            "seconds": _number,
            "notes": _each(_of(MediaNote), (list, tuple)),
        },
    ),
    "note": StructRule(MediaNote, {"path": _text, "modality": _text, "note": _text}),
    "encoded": StructRule(
        Encoded, {"embeddings": is_tensor, "deepstack": _or_none(is_tensor), "kept": _or_none(is_tensor)}
    ),
    "error": StructRule(
        MMPluginError,
        {"name": lambda name: name in _ERRORS, "message": _text, "attributes": _fields},
        to_fields=_error_fields,
        from_fields=_error,
    ),
    "memory_error": StructRule(
        MemoryError,
        {"message": _text},
        to_fields=lambda error: {"message": str(error)},
        from_fields=lambda fields: MemoryError(fields["message"]),
    ),
    "size": StructRule(Size, {"height": _count, "width": _count}),
    "sampled_video": StructRule(
        SampledVideo,
        {
            "height": _count,
            "width": _count,
            "indices": _ids,
            "timestamps": _array(np.float64, None),
            "fps": _number,
            "notes": are_notes,
        },
        from_fields=_sampled_video,
    ),
    "audio_size": StructRule(AudioSize, {"num_samples": _count, "sampling_rate": _count}),
    "model_ref": StructRule(
        ModelRef,
        {
            "checkpoint": _text,
            "plugin": _text,
            "architecture": _or_none(_text),
            "fallback": _text,
            "options": _fields,
        },
    ),
}

for _rule in RULES.values():
    if issubclass(_rule.cls, msgspec.Struct) and set(_rule.fields) != set(_rule.cls.__struct_fields__):
        raise TypeError(f"wire.structs: the fields of {_rule.cls.__name__} have changed; say what each may be")
