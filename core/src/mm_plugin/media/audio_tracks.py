"""Which of a container's audio tracks is used, and what it is decoded with. Decodes nothing.

The first track that can be decoded is used; a note says why an earlier one was passed over. Formats and codecs are those that
people send; a rare decoder is an untested one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from mm_plugin.errors import MediaError
from mm_plugin.media.encryption import encrypted_tracks
from mm_plugin.media.isobmff import boxes, number

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

# FFmpeg's names of demuxers.
FORMATS = (
    "wav,w64,aiff,au,caf,flac,mp3,aac,loas,ac3,eac3,dts,amr,ogg,wv,tta,asf,"
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts,mpeg"
)
# Streams of frames that each begin with a pattern of their own; what lies between two of them is passed over, as players do.
BARE_FORMATS = frozenset({"mp3", "aac", "loas", "ac3", "eac3", "dts"})
# No header says their length, and FFmpeg's estimate assumes a constant bit rate.
HEADERLESS_FORMATS = frozenset({"aac", "loas", "ac3", "eac3", "dts", "amr"})
# Broadcasts and their recordings, which may begin and end within a frame.
CUT_FORMATS = frozenset({"mpegts", "mpeg"})
_CODECS = frozenset(
    {
        "flac", "alac", "wavpack", "tta",
        "mp1", "mp2", "mp3", "aac", "aac_latm", "ac3", "eac3", "dts", "truehd", "mlp",
        "vorbis", "opus", "amr_nb", "amr_wb", "gsm", "gsm_ms",
        "wmav1", "wmav2", "wmapro", "wmalossless", "wmavoice",
        "adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt", "adpcm_swf", "adpcm_g722", "adpcm_g726", "adpcm_yamaha", "nellymoser",
        "s302m",
    }
)  # fmt: skip
MOST_CHANNELS = 64
# Samples of one decoded frame, all channels together; the largest frames of lossless codecs in use have a quarter of that.
_MOST_FRAME = 1 << 23
_DEPENDENT = 0x80000  # FFmpeg's mark of a substream that is only a part of what is heard


class AudioTrack(NamedTuple):
    """The track that is decoded.

    Attributes:
        stream: ready to be decoded.
        notes: which tracks before it were passed over, and why.
    """

    stream: AudioStream
    notes: tuple[str, ...]


def choose_track(container: InputContainer, data: bytes) -> AudioTrack:
    """The first audio track that can be decoded.

    Args:
        container: opened.
        data: the file.

    Raises:
        MediaError: there is no audio, or none that can be decoded; the error is about the first track.
    """
    passed: list[tuple[str, str]] = []
    encrypted = encrypted_tracks(container, data)
    parts = _parts_of_scenes(container, data)
    for place, stream in enumerate(container.streams.audio):
        fault = _fault(stream, parts=parts.get(stream.index, 1), encrypted=place in encrypted)
        if fault is None:
            _discard_others(container, stream)
            stream.codec_context.options = {"max_samples": str(_MOST_FRAME)}
            reasons = "; ".join(f"track {at} is {why}" for at, (_, why) in enumerate(passed, 1))
            return AudioTrack(stream, (f"audio track {place + 1} was used; {reasons}",) if passed else ())
        passed.append(fault)
    if not passed:
        raise MediaError("the file holds no audio", reason="format")
    reason, why = passed[0]
    fix = "send it decrypted" if reason == "encrypted" else "convert the audio to FLAC, MP3 or WAV"
    raise MediaError(f"the audio is {why}; {fix}", reason=reason)


def _fault(stream: AudioStream, *, parts: int, encrypted: bool) -> tuple[str, str] | None:
    """Why a track is not decoded: a reason and words for it; None where it can be."""
    name = stream.codec_context.codec.canonical_name if stream.codec_context is not None else "unknown"
    if encrypted or _tag(stream) in ("drms", "aavd"):  # of iTunes and of Audible
        return "encrypted", "encrypted"
    if parts > 1:
        return "codec", f"an IAMF scene of {parts} substreams, which are not combined"
    if name not in _CODECS and not name.startswith("pcm_"):
        return "codec", f"in an unsupported audio codec ({name})"
    if (stream.channels or 0) > MOST_CHANNELS:
        return "codec", f"of more than {MOST_CHANNELS} channels"
    return None


def _tag(stream: AudioStream) -> str:
    """The four letters by which a container names the codec; empty where it has a number in their place."""
    try:
        return stream.codec_context.codec_tag if stream.codec_context is not None else ""
    except UnicodeDecodeError:
        return ""


def _discard_others(container: InputContainer, chosen: AudioStream) -> None:
    from av.stream import Discard

    for stream in container.streams:
        if stream is not chosen:
            stream.discard = Discard.all


def _parts_of_scenes(container: InputContainer, data: bytes) -> dict[int, int]:
    """Index of a stream -> of how many streams the scene consists that it is a part of; only scenes of IAMF have several.

    Source: Immersive Audio Model and Formats 1.0, sections 3.6 and 6.2.
    """
    if b"iacb" not in data or not container.format.name.startswith("mov"):
        return {}
    counts = [_substreams(data, start, end) for start, end in _tracks(data)]
    if sum(counts) != len(container.streams):  # the tree of boxes is not what FFmpeg read
        return {stream.index: len(container.streams.audio) + 1 for stream in container.streams.audio}
    parts = [count for count in counts for _ in range(count)]
    return dict(enumerate(parts))


def _tracks(data: bytes) -> Iterator[tuple[int, int]]:
    for kind, start, end in boxes(data, 0, len(data)):
        if kind == b"moov":
            for child, first, last in boxes(data, start, end):
                if child == b"trak":
                    yield first, last


def _substreams(data: bytes, start: int, end: int) -> int:
    """Substreams of the scene in a track, all of its audio elements together; 1 in a track of another kind."""
    at = data.find(b"iacb", start, end)
    if at < 0:
        return 1
    stop = min(end, at - 4 + number(data, at - 4))
    _, at = _leb128(data, at + 5)
    total = 0
    while at < stop:
        header = data[at]
        size, content = _leb128(data, at + 1)
        if header >> 3 == 1:  # an audio element
            first = content
            if header & 1:  # extension
                extra, first = _leb128(data, first)
                first += extra
            _, first = _leb128(data, first)  # its id
            _, first = _leb128(data, first + 1)  # its codec
            total += _leb128(data, first)[0]
        at = content + size
    return max(total, 1)


def _leb128(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = 0
    for place in range(8):
        byte = data[at + place] if at + place < len(data) else 0
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return value, at + 8
