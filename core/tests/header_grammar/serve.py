"""Builds the file of a seed, and serves it.

`python -m header_grammar.serve FIRST LAST` works on the files of these seeds, and prints a line of JSON before and after each.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from header_grammar.boxes import heif, jp2, mp4
from header_grammar.images import bmp, gif, ico, jpeg, png, ppm, tiff
from header_grammar.pieces import Pieces
from header_grammar.riff import aiff, avi, matroska, wav, webp
from header_grammar.streams import flac, flv, mpeg_audio, mpeg_streams, ogg
from mm_plugin.errors import RequestError
from mm_plugin.items import Modality
from mm_plugin.media import Sampling, VideoSize
from mm_plugin.media.kinds import MEDIA_KINDS
from mm_plugin.settings import Settings

# Small decoded sizes, so that what a header costs stands out; all counts that headers claim are at their defaults.
SETTINGS = Settings(max_image_pixels=1 << 22, max_audio_seconds=60.0, max_media_bytes=1 << 22)
MOST_FRAMES = 4
Build = Callable[["Pieces"], bytes]

BUILDERS: dict[str, Build] = {
    "mp4": mp4,
    "heif": heif,
    "jp2": jp2,
    "matroska": matroska,
    "wav": wav,
    "avi": avi,
    "webp": webp,
    "aiff": aiff,
    "ogg": ogg,
    "flac": flac,
    "mpeg audio": mpeg_audio,
    "flv": flv,
    "mpeg streams": mpeg_streams,
    "png": png,
    "jpeg": jpeg,
    "gif": gif,
    "bmp": bmp,
    "ico": ico,
    "tiff": tiff,
    "ppm": ppm,
}


def build(seed: int) -> tuple[str, bytes]:
    """The container of a seed, and its file."""
    p = Pieces(seed)
    name = list(BUILDERS)[seed % len(BUILDERS)]
    data = BUILDERS[name](p)
    if p.flag(2 * p.level):
        data = data[: p.random.randrange(len(data) + 1)]
    return name, data[: SETTINGS.max_media_bytes]


# ------------------------------------------------------------------ what becomes of them


class Rules:
    """A few frames of a video, and a usual rate of audio."""

    def sample(self, size: VideoSize) -> Sampling:
        chosen = np.unique(np.linspace(0, size.frames - 1, MOST_FRAMES).astype(np.int64))
        return Sampling(chosen, chosen / max(size.fps, 1e-6), 1.0)

    def sampling_rate(self) -> int:
        return 16_000


def serve(data: bytes, modality: Modality) -> str:
    """Open, measure and decode a file: `decoded`, or the reason why not."""
    try:
        source = MEDIA_KINDS[modality].open(data, path="media", settings=SETTINGS)
        decoded = source.decode(source.size(Rules()))
        if modality is Modality.VIDEO:
            for _ in decoded.frames:
                pass
    except RequestError as error:
        str(error).encode()
        return str(getattr(error, "reason", None) or getattr(error, "setting", None) or error.code)
    return "decoded"


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> int:
    """A figure of this process, bytes: `VmHWM` is the peak since the last reset, `VmRSS` what is there now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(first: int, last: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for seed in range(first, last):
        name, data = build(seed)
        for modality in Modality:
            fact: dict[str, Any] = {"seed": seed, "container": name, "bytes": len(data), "modality": modality.name}
            print(json.dumps(fact), flush=True)
            reset_peak()
            before, began = memory("VmRSS"), time.process_time()
            try:
                fact["end"] = serve(data, modality)
            except BaseException as error:
                fact["wrong"] = f"{type(error).__name__}: {str(error)[:200]}"
            fact["seconds"] = round(time.process_time() - began, 3)
            fact["peak"] = memory("VmHWM") - before
            print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
