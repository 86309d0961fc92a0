"""An encoded video as it is opened again and again: its stream of packets, and the frames that a decoder makes of them.

A decoder runs in one thread. With several, FFmpeg reports damage late or not at all, depending on which thread is faster, so the
same file would be served or refused by luck.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mm_plugin.errors import MediaError
from mm_plugin.media.limits import check_pixels
from mm_plugin.media.pyav import CheckedFile, import_av, open_container, open_packets
from mm_plugin.media.video_packets import Packets, packets_of
from mm_plugin.settings import Settings

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# FFmpeg's names.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif"
_CODECS = frozenset(
    {
        "h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg", "gif", "theora",
        "msmpeg4v2", "msmpeg4v3", "prores", "h263",
    }
)  # fmt: skip
_MOST_DELAYED = 64  # frames that a decoder may hold back; no codec allows more than 16


class OpenVideo:
    """The video stream of an opened file. Final; made by `VideoFile.open`.

    Attributes:
        container: that holds it.
        stream: the video.
        codec: FFmpeg's name of the codec.
    """

    def __init__(self, container: InputContainer, stream: VideoStream, codec: str) -> None:
        self.container, self.stream, self.codec = container, stream, codec

    def read_packets(self) -> Packets:
        """What reads this stream's packets, from the first on."""
        return packets_of(self.codec, self.stream.codec_context.extradata or b"")

    def decode(self, *, skip: int = 0) -> Iterator[tuple[VideoFrame, bool]]:
        """Every frame that can be decoded from here on, and whether it may refer to one that could not.

        Args:
            skip: packets to pass over first.
        """
        broken = import_av().FFmpegError
        reads = self.read_packets()
        sent: deque[int | None] = deque(maxlen=_MOST_DELAYED)
        lost = False
        safe: set[int | None] = set()  # times of frames that were sent before the one that was lost
        count = 0
        for packet in self.container.demux(self.stream):
            if not packet.size:
                continue  # nothing to decode, or the end, which the decoder would take this for
            count += 1
            if count <= skip:
                continue
            holds = reads.read(bytes(packet))
            if not holds.image and self.codec == "gif":
                continue  # its decoder refuses a packet that holds only a comment
            try:
                frames = packet.decode()
            except broken:
                if holds.image:
                    lost, safe = True, set(sent)
                continue
            sent.append(packet.pts)
            for frame in frames:
                lost = lost and not is_whole(frame)
                yield frame, lost and frame.pts not in safe
            frames = []
        try:
            frames = self.stream.codec_context.decode(None)
        except broken:
            return
        for frame in frames:
            lost = lost and not is_whole(frame)
            yield frame, lost and frame.pts not in safe


def is_whole(frame: VideoFrame) -> bool:
    """Whether a frame refers to no other."""
    from av.video.frame import PictureType

    return bool(frame.key_frame) and frame.pict_type == PictureType.I


class VideoFile:
    """An encoded video with its limits. Final.

    Args:
        path: where it stands in the request, for messages.
        settings: limits.
        data: the encoded file.
    """

    def __init__(self, path: str, settings: Settings, data: bytes) -> None:
        self.path, self.settings = path, settings
        self._file = CheckedFile(data, path=path, settings=settings)

    @property
    def data(self) -> bytes:
        """The file without its tags."""
        return self._file.data

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenVideo]:
        """The video stream, ready to be decoded."""
        with open_container(self._file, _FORMATS) as container:
            yield self._opened(container)

    @contextlib.contextmanager
    def open_packets(self) -> Iterator[tuple[OpenVideo, Iterator[Packet[Any]]]]:
        """The video stream, and every packet of all streams of the file."""
        with open_packets(self._file, _FORMATS) as (container, packets):
            yield self._opened(container), packets

    def _opened(self, container: InputContainer) -> OpenVideo:
        """The first stream that is a moving image."""
        from av.stream import Disposition

        for stream in container.streams.video:
            if not stream.disposition & Disposition.attached_pic:
                break
        else:
            raise MediaError("the file holds no video", reason="format")
        codec = stream.codec_context
        name = codec.codec.canonical_name if codec is not None else "unknown"
        if codec is None or name not in _CODECS:
            raise MediaError(f"unsupported video codec {name}; convert the video to H.264", reason="codec")
        check_pixels(self.path, max(stream.height, 1), max(stream.width, 1), self.settings)
        # The size in a frame's own header counts too; a decoder works in whole blocks, so it may ask for a little more.
        limit = self.settings.max_image_pixels
        codec.options = {"max_pixels": str(limit + limit // 8 + (1 << 16))}
        codec.thread_count = 1
        return OpenVideo(container, stream, name)
