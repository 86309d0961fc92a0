"""Rows over videos: frames to compact patches, and a long file from which few frames are sampled."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from benchmarks.harness import Bar, Row
from benchmarks.pixel_rows import img
from mm_plugin import Modality, Registry, VideoFrames
from mm_plugin.media import SampledVideo, open_video, whole


def rows(registry: Registry, checkpoint: Path) -> Iterator[Row]:
    """Sixteen frames of 720p, and a minute of video from which eight frames are taken."""
    processor = registry.load_processor(checkpoint)
    yield _frames(processor)
    yield _long_video(processor)


def _patches(images: torch.Tensor, grid: np.ndarray) -> torch.Tensor:
    """Resized and cut by plain torch, all frames at once: [n, 3, height, width] uint8 -> [n_patches, 3, 392]."""
    _, high, wide = grid[0].tolist()
    out = torch.nn.functional.interpolate(images, (high * 14, wide * 14), mode="bicubic", antialias=True)
    cut = out.reshape(len(out) // 2, 2, 3, high // 2, 2, 14, wide // 2, 2, 14)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3, 392)


def _check(ours: Any, reference: Any, _floor: Any) -> None:
    assert np.array_equal(ours, reference.numpy())


def _frames(processor: Any) -> Row:
    frames = np.stack([np.roll(img(720, 1280), 16 * n, axis=1) for n in range(16)])
    footage = open_video(VideoFrames(frames, fps=2), path="videos[0]", settings=processor.settings)
    size = footage.probe()
    sampled = whole(size)
    known = SampledVideo(size.height, size.width, sampled.indices, sampled.timestamps, sampled.fps)
    layout = processor.model.layout(Modality.VIDEO, known, processor.options, None)
    planar = torch.from_numpy(frames).permute(0, 3, 1, 2)  # channels last: the faster way
    return Row(
        "video patches, 16 frames of 720 x 1,280, compact",
        lambda: processor.model.prepare(footage.decode(known), layout, processor.options),
        _check,
        Bar(1.5, "reference"),  # which holds every frame and uses every thread
        ("torch, all frames at once", lambda: _patches(planar, layout["video_grid_thw"])),
    )


def _minute() -> bytes:
    file, still = io.BytesIO(), img(240, 320)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 320, 240, "yuv420p", 24
        for n in range(24 * 60):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(still, 2 * n, axis=1), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _long_video(processor: Any) -> Row:
    data = _minute()
    options = type(processor.options)(num_frames=8)

    def ours() -> np.ndarray:
        footage = open_video(data, path="videos[0]", settings=processor.settings)
        size = footage.probe()
        chosen = processor.model.sample(size, options)
        known = SampledVideo(size.height, size.width, chosen.indices, chosen.timestamps, chosen.fps)
        layout = processor.model.layout(Modality.VIDEO, known, options, None)
        patches: np.ndarray = processor.model.prepare(footage.decode(known), layout, options)
        return patches

    def reference() -> torch.Tensor:
        with av.open(io.BytesIO(data)) as container:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        chosen = torch.linspace(0, len(frames) - 1, 8).round().long()
        return _patches(torch.from_numpy(frames)[chosen].permute(0, 3, 1, 2), np.array([[4, 20, 28]]))

    return Row(
        "a minute of 240 x 320 at 24 frames per second, 8 of them sampled",
        ours,
        _check,
        Bar(0.5, "reference"),
        ("decode every frame, then choose", reference),
    )
