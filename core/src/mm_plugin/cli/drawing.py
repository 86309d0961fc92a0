"""Draws a processed prompt: what the model sees of each item, and the prompt as a strip of colored tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from mm_plugin.demo.base import DemoVideo, EmbeddingBoxes, View
from mm_plugin.inputs.processed import MultimodalProcessorOutput
from mm_plugin.media.video import open_video
from mm_plugin.settings import Settings

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_WIDTH, _MARGIN, _CELL, _GAP = 1200, 24, 10, 1
# Pixels of a view's height, of one of several, and of the two lines below it.
_TALLEST, _TALLEST_OF_MANY, _TITLES = 420, 300, 52
_FRAME_HEIGHT, _MOST_FRAMES = 110, 48
_CHART = 180  # pixels of its height
_PAPER, _INK, _TEXT_CELL = (250, 249, 246), (40, 40, 46), (176, 176, 182)
# Hues that also differ in lightness, for readers with color blindness; they repeat after six items.
_ITEM_COLORS = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0))


def row_view(name: str, data: bytes, rows: EmbeddingBoxes) -> View:
    """An image with the grid of its rows.

    Args:
        name: name of the file.
        data: the encoded file.
        rows: where the rows of its embeddings lie.
    """
    with Image.open(io.BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB").resize((rows.width, rows.height))
    caption = f"resized to {rows.height} x {rows.width} pixels, {len(rows.boxes)} rows"
    return View(name, caption, np.asarray(image), rows.boxes)


def video_view(video: DemoVideo, time_positions: np.ndarray | None) -> View:
    """The sampled frames of a video, each with its time and, if positions have a time axis, its position on that axis.

    Args:
        video: the video with the frames that were chosen.
        time_positions: [n_steps] int64, the time axis of its temporal patches; None for a model with ordinary positions.
    """
    source = open_video(video.data, path="video", settings=Settings())
    frames = list(source.decode(video.size).frames)
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), _MOST_FRAMES)).round().astype(int))
    width = max(1, round(video.size.width * _FRAME_HEIGHT / video.size.height))
    across = max(1, min(len(chosen), round((len(chosen) * _FRAME_HEIGHT * 2 / width) ** 0.5)))
    cell_width, cell_height = width + 6, _FRAME_HEIGHT + 22
    sheet = Image.new("RGB", (across * cell_width + 6, -(-len(chosen) // across) * cell_height + 6), _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for place, index in enumerate(chosen):
        left, top = place % across * cell_width + 6, place // across * cell_height + 6
        sheet.paste(Image.fromarray(frames[index]).resize((width, _FRAME_HEIGHT)), (left, top))
        label = f"{video.size.timestamps[index]:.2f} s"
        if time_positions is not None:
            step = int(index) * len(time_positions) // len(frames)
            label += f"  t {time_positions[step]}"
        pen.text((left, top + _FRAME_HEIGHT + 3), label, fill=_INK, font=font)
    caption = f"{video.size.frames} frames of {video.size.height} x {video.size.width}, {video.size.fps:.2f} per second"
    return View(video.name, caption, np.asarray(sheet))


def draw(
    items: Sequence[Sequence[View]], output: MultimodalProcessorOutput, *, chunk: int, positions: bool = False
) -> Image.Image:
    """Draw one request.

    Args:
        items: for each item, what the model sees of it.
        output: the processed request.
        chunk: tokens in a prefill chunk; the first token of each is marked.
        positions: whether to draw the three axes of M-RoPE over the tokens.

    Returns:
        An RGB image.
    """
    font, small = ImageFont.load_default(size=18), ImageFont.load_default(size=14)
    panels = [_panel(views, index, len(items), font, small) for index, views in enumerate(items)]
    top = _MARGIN + max((panel.height for panel in panels), default=0) + _MARGIN
    columns = (_WIDTH - 2 * _MARGIN) // (_CELL + _GAP)
    rows = -(-len(output.input_ids) // columns)
    below = top + 60 + rows * (_CELL + 5) + _MARGIN
    height = below + (60 + _CHART + _MARGIN if positions else 24)
    sheet = Image.new("RGB", (_WIDTH, height), _PAPER)
    left = _MARGIN
    for panel in panels:
        sheet.paste(panel, (left, _MARGIN))
        left += panel.width + _MARGIN
    _strip(sheet, top, columns, output, chunk, font, small)
    if positions and output.mrope_positions is not None:
        _chart(sheet, below, output.mrope_positions, output, font, small)
    return sheet


def _owners(output: MultimodalProcessorOutput) -> np.ndarray:
    """For each token the index of its item, -1 for text."""
    owner = np.full(len(output.input_ids), -1)
    for index, item in enumerate(output.mm_items):
        for start, end in item.offsets:
            owner[start : end + 1] = index
    return owner


def _chart(
    sheet: Image.Image, top: int, positions: np.ndarray, output: MultimodalProcessorOutput, font: Font, small: Font
) -> None:
    """Position ids over tokens: height and width lightly, time on top in the color of its item."""
    pen, owner = ImageDraw.Draw(sheet), _owners(output)
    seq, most = positions.shape[1], max(1, int(positions.max()))
    pen.text((_MARGIN, top), f"position ids, 0 to {most}", fill=_INK, font=font)
    pen.text((_MARGIN, top + 26), "gray: height and width   color: time   left to right: tokens", fill=_INK, font=small)
    left, floor = _MARGIN, top + 56 + _CHART

    def place(token: int, position: int) -> tuple[float, float]:
        along = token * (_WIDTH - 2 * _MARGIN - 3) / max(1, seq - 1)
        return left + along, floor - position * _CHART / most

    pen.line((left, floor - _CHART, left, floor, _WIDTH - _MARGIN, floor), fill=_TEXT_CELL)
    for axis in (2, 1, 0):
        for token in range(seq):
            x, y = place(token, int(positions[axis, token]))
            index = int(owner[token])
            color = _TEXT_CELL if axis else _INK if index < 0 else _ITEM_COLORS[index % len(_ITEM_COLORS)]
            size = 2 if axis == 0 else 1
            pen.rectangle((x, y - size, x + size, y), fill=color)


def _panel(views: Sequence[View], index: int, count: int, font: Font, small: Font) -> Image.Image:
    """The views of one item, one below another."""
    width = (_WIDTH - _MARGIN) // max(1, min(count, 4)) - _MARGIN
    color = _ITEM_COLORS[index % len(_ITEM_COLORS)]
    drawn = [_drawn(view, width, _TALLEST if len(views) == 1 else _TALLEST_OF_MANY, color) for view in views]
    panel = Image.new("RGB", (width, sum(image.height + _TITLES for image in drawn)), _PAPER)
    pen, top = ImageDraw.Draw(panel), 0
    for view, image in zip(views, drawn, strict=True):
        panel.paste(image, (0, top))
        top += image.height
        pen.text((0, top + 6), view.title, fill=color, font=font)
        pen.text((0, top + 30), view.caption, fill=_INK, font=small)
        top += _TITLES
    return panel


def _drawn(view: View, widest: int, tallest: int, color: tuple[int, int, int]) -> Image.Image:
    """A view, scaled to fit, with its boxes and frames."""
    height, width = view.pixels.shape[:2]
    scale = min(widest / width, tallest / height, 1.5)
    image = Image.fromarray(view.pixels).resize((max(1, round(width * scale)), max(1, round(height * scale))))
    pen = ImageDraw.Draw(image, "RGBA")
    whole = (0, 0, width, height)
    for boxes, line, opacity in ((view.boxes, 1, 150), (view.frames, 3, 255), ((whole,), 3, 255)):
        for left, top, right, bottom in boxes:
            box = (left * scale, top * scale, right * scale - 1, bottom * scale - 1)
            pen.rectangle(box, outline=(*color, opacity), width=line)
    return image


def _strip(
    sheet: Image.Image,
    top: int,
    columns: int,
    output: MultimodalProcessorOutput,
    chunk: int,
    font: Font,
    small: Font,
) -> None:
    pen = ImageDraw.Draw(sheet)
    seq, owner = len(output.input_ids), _owners(output)
    pen.text((_MARGIN, top), f"the prompt, {seq} tokens", fill=_INK, font=font)
    legend = f"gray: text   color: rows of an item   bar above: first token of a chunk of {chunk}"
    pen.text((_MARGIN, top + 26), legend, fill=_INK, font=small)
    for token in range(seq):
        row, column = divmod(token, columns)
        left, upper = _MARGIN + column * (_CELL + _GAP), top + 60 + row * (_CELL + 5)
        index = int(owner[token])
        color = _TEXT_CELL if index < 0 else _ITEM_COLORS[index % len(_ITEM_COLORS)]
        pen.rectangle((left, upper, left + _CELL - 1, upper + _CELL - 1), fill=color)
        if token % chunk == 0:
            pen.rectangle((left, upper - 3, left + _CELL - 1, upper - 2), fill=_INK)
