"""Frames: what `encode` makes of a request, its items, tasks or embeddings, and `decode` makes again in another process.

The first frame is a header, the others are the buffers of its arrays, one each, which a transport can send without copying them
(`socket.send_multipart(frames, copy=False)` of ZeroMQ). `pack` puts all frames into one run of bytes, for a transport or a store
that takes one.

    header: b"mmpw", the version as one byte, msgpack of [value, [bytes of each buffer]]; see `wire.values` for the value
    packed: b"mmpk", the version, a checksum, count of frames as 4 bytes little-endian, the bytes of each as 8, then the frames,
            each from a multiple of 64 bytes on; the checksum is BLAKE3 of the count, the sizes and the BLAKE3 of each frame

Nothing is pickled and no code is named, so frames can do nothing but become one of the values in `wire.structs`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from mm_plugin.errors import UsageError
from mm_plugin.identity.digests import digest
from mm_plugin.wire.structs import ENUMS, RULES
from mm_plugin.wire.values import Reader, Writer, refuse

T = TypeVar("T")
Frame = bytes | bytearray | memoryview

VERSION = 1
MAX_BYTES = 1 << 34

_MAGIC, _PACKED = b"mmpw", b"mmpk"
_MAX_HEADER = 1 << 26
_MAX_FRAMES = 1 << 20
_ALIGNMENT = 64
_DIGEST = 32
_COUNT, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")


def encode(value: Any) -> list[memoryview]:
    """A value as frames. Its arrays are not copied where they are contiguous, so it must not change until the frames are sent.

    Args:
        value: a `MultimodalProcessorOutput`, `MultimodalInputs`, `MultimodalDataItem`, `PrepareTask`, `JointTask`, `Prepared`,
            `JointPrepared`, `Encoded` or error of this package; or a list, tuple or mapping of them, of arrays and tensors, and of
            plain values. Tensors of a device are copied to the host.

    Returns:
        The header, and a frame for each array.

    Raises:
        UsageError: a part cannot travel: an object of another class, a sparse, quantized or nested tensor, an array of objects.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import wire
        >>> from mm_plugin import Modality, MultimodalDataItem
        >>> item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(1, 2)], feature=np.ones((2, 3), np.float32))
        >>> item.set_identity(bytes(32))
        >>> frames = wire.encode(item)
        >>> again = wire.decode(frames, MultimodalDataItem)
        >>> len(frames), again.offsets, wire.same(item, again)
        (2, [(1, 2)], True)
    """
    writer = Writer(RULES, ENUMS)
    try:
        plain = writer.plain(value)
        body = msgspec.msgpack.encode([plain, [buffer.nbytes for buffer in writer.buffers]])
    except (UnicodeEncodeError, OverflowError) as error:
        raise UsageError(f"value: text with lone surrogates cannot be sent ({error})", argument="value") from error
    return [memoryview(_MAGIC + bytes([VERSION]) + body), *writer.buffers]


def decode(frames: Sequence[Frame], kind: type[T] | None = None, *, max_bytes: int = MAX_BYTES) -> Any:
    """The value of frames. Its arrays are views of them: read-only where a frame is.

    Args:
        frames: what `encode` returned, in order.
        kind: the class that is expected; any that `encode` takes where None.
        max_bytes: of all frames together.

    Raises:
        UsageError: the frames are of another version, truncated, corrupted, larger than `max_bytes`, or of another kind. Nothing
            was allocated by a count that they claim.
    """
    views = _views(frames)
    total = sum(view.nbytes for view in views)
    if total > max_bytes:
        raise refuse(f"expected at most {max_bytes} bytes, got {total}; raise max_bytes")
    if not views or bytes(views[0][:4]) != _MAGIC or len(views[0]) > _MAX_HEADER:
        raise refuse("expected a header first")
    if bytes(views[0][4:5]) != bytes([VERSION]):
        raise refuse(f"expected version {VERSION}, got {bytes(views[0][4:5]).hex()}")
    try:
        body = msgspec.msgpack.decode(views[0][5:])
        plain, lengths = body
        if [view.nbytes for view in views[1:]] != lengths:
            raise refuse("the header names other buffers")
        value = Reader(RULES, ENUMS, views[1:]).value(plain)
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise refuse(f"the header is corrupted ({type(error).__name__})") from error
    if kind is not None and not isinstance(value, kind):
        raise refuse(f"expected a {kind.__name__}, got a {type(value).__name__}")
    return value


def _views(frames: Sequence[Frame]) -> list[memoryview]:
    if isinstance(frames, bytes | bytearray | memoryview | str):
        raise refuse("expected several frames, got one; use wire.unpack for what wire.pack made")
    try:
        return [memoryview(frame).cast("B") for frame in frames]
    except TypeError as error:
        raise refuse("expected contiguous bytes") from error


def pack(value: Any) -> list[memoryview]:
    """A value as parts of one run of bytes, to be written one after another; with a checksum. See `encode`.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import wire
        >>> data = b"".join(wire.pack({"rows": np.arange(3)}))
        >>> wire.unpack(data)["rows"].tolist()
        [0, 1, 2]
    """
    frames = encode(value)
    prologue = _COUNT.pack(len(frames)) + b"".join(_LENGTH.pack(frame.nbytes) for frame in frames)
    at = len(_PACKED) + 1 + _DIGEST + len(prologue)
    parts: list[memoryview] = [memoryview(prologue)]
    for frame in frames:
        parts += [memoryview(bytes(-at % _ALIGNMENT)), frame]
        at += -at % _ALIGNMENT + frame.nbytes
    return [memoryview(_PACKED + bytes([VERSION]) + _checksum(prologue, frames)), *parts]


def _checksum(prologue: bytes | memoryview, frames: Sequence[memoryview]) -> bytes:
    return digest(bytes(prologue) + b"".join(map(digest, frames)))


def unpack(data: Frame, kind: type[T] | None = None, *, max_bytes: int = MAX_BYTES) -> Any:
    """The value of what `pack` made; its arrays are views of the data.

    Args:
        data: the parts, joined.
        kind: as for `decode`.
        max_bytes: as for `decode`.

    Raises:
        UsageError: the checksum differs, or as for `decode`.
    """
    (view,) = _views([data])
    start = len(_PACKED) + 1 + _DIGEST
    if view.nbytes > max_bytes:
        raise refuse(f"expected at most {max_bytes} bytes, got {view.nbytes}; raise max_bytes")
    if bytes(view[:5]) != _PACKED + bytes([VERSION]) or len(view) < start + _COUNT.size:
        raise refuse(f"expected packed frames of version {VERSION}")
    (count,) = _COUNT.unpack_from(view, start)
    at = start + _COUNT.size + count * _LENGTH.size
    if count > _MAX_FRAMES or at > len(view):
        raise refuse("truncated")
    frames = []
    for index in range(count):
        (length,) = _LENGTH.unpack_from(view, start + _COUNT.size + index * _LENGTH.size)
        at += -at % _ALIGNMENT
        frames.append(view[at : at + length])
        if len(frames[-1]) != length:
            raise refuse("truncated")
        at += length
    if _checksum(view[start : start + _COUNT.size + count * _LENGTH.size], frames) != bytes(view[5:start]):
        raise refuse("the checksum differs")
    return decode(frames, kind, max_bytes=max_bytes)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal by content: classes, fields, dtypes, shapes and bytes, wherever their arrays lie.

    A list is not a tuple, a numpy array not a tensor, and the order of a mapping's keys does not matter.
    """
    return _comparable(one) == _comparable(other)


def _comparable(value: Any) -> list[bytes]:
    writer = Writer(RULES, ENUMS, sort=True)
    return [msgspec.msgpack.encode(writer.plain(value)), *map(bytes, writer.buffers)]
