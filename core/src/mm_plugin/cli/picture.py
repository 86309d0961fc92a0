"""Draws a processed prompt: what the model sees of each photograph, and the prompt as a strip of coloured tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from mm_plugin.structs import MultimodalProcessorOutput
from mm_plugin.testing import RowBoxes, View

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_WIDTH, _MARGIN, _CELL, _GAP = 1200, 24, 10, 1
# Pixels of a view's height, of one of several, and of the two lines below it.
_TALLEST, _TALLEST_OF_MANY, _TITLES = 420, 300, 52
_PAPER, _INK, _TEXT_CELL = (250, 249, 246), (40, 40, 46), (176, 176, 182)
# Hues that differ in lightness too, for readers who see few colours; they repeat after six items.
_ITEM_COLOURS = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0))


def row_view(name: str, data: bytes, rows: RowBoxes) -> View:
    """A photograph with the grid of its rows.

    Args:
        name: of the file.
        data: the encoded file.
        rows: where they lie.
    """
    with Image.open(io.BytesIO(data)) as opened:
        picture = ImageOps.exif_transpose(opened).convert("RGB").resize((rows.width, rows.height))
    caption = f"resized to {rows.height} x {rows.width} pixels, {len(rows.boxes)} rows"
    return View(name, caption, np.asarray(picture), rows.boxes)


def draw(items: Sequence[Sequence[View]], output: MultimodalProcessorOutput, *, chunk: int) -> Image.Image:
    """The picture of one request.

    Args:
        items: for each item, what the model sees of it.
        output: the processed request.
        chunk: tokens in a prefill chunk; the first token of each is marked.

    Returns:
        An RGB image.
    """
    font, small = ImageFont.load_default(size=18), ImageFont.load_default(size=14)
    panels = [_panel(views, index, len(items), font, small) for index, views in enumerate(items)]
    top = _MARGIN + max((panel.height for panel in panels), default=0) + _MARGIN
    columns = (_WIDTH - 2 * _MARGIN) // (_CELL + _GAP)
    rows = -(-len(output.input_ids) // columns)
    height = top + 60 + rows * (_CELL + 5) + _MARGIN + 24
    sheet = Image.new("RGB", (_WIDTH, height), _PAPER)
    left = _MARGIN
    for panel in panels:
        sheet.paste(panel, (left, _MARGIN))
        left += panel.width + _MARGIN
    _strip(sheet, top, columns, output, chunk, font, small)
    return sheet


def _panel(views: Sequence[View], index: int, count: int, font: Font, small: Font) -> Image.Image:
    """The views of one item, one below the other."""
    room = (_WIDTH - _MARGIN) // max(1, min(count, 4)) - _MARGIN
    colour = _ITEM_COLOURS[index % len(_ITEM_COLOURS)]
    drawn = [_drawn(view, room, _TALLEST if len(views) == 1 else _TALLEST_OF_MANY, colour) for view in views]
    panel = Image.new("RGB", (room, sum(picture.height + _TITLES for picture in drawn)), _PAPER)
    pen, top = ImageDraw.Draw(panel), 0
    for view, picture in zip(views, drawn, strict=True):
        panel.paste(picture, (0, top))
        top += picture.height
        pen.text((0, top + 6), view.title, fill=colour, font=font)
        pen.text((0, top + 30), view.caption, fill=_INK, font=small)
        top += _TITLES
    return panel


def _drawn(view: View, room: int, tallest: int, colour: tuple[int, int, int]) -> Image.Image:
    """A view, scaled to its place, with its boxes and frames."""
    height, width = view.pixels.shape[:2]
    scale = min(room / width, tallest / height, 1.5)
    picture = Image.fromarray(view.pixels).resize((max(1, round(width * scale)), max(1, round(height * scale))))
    pen = ImageDraw.Draw(picture, "RGBA")
    whole = (0, 0, width, height)
    for boxes, line, opacity in ((view.boxes, 1, 150), (view.frames, 3, 255), ((whole,), 3, 255)):
        for left, top, right, bottom in boxes:
            box = (left * scale, top * scale, right * scale - 1, bottom * scale - 1)
            pen.rectangle(box, outline=(*colour, opacity), width=line)
    return picture


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
    seq = len(output.input_ids)
    owner = np.full(seq, -1)
    for index, item in enumerate(output.mm_items):
        for start, end in item.offsets:
            owner[start : end + 1] = index
    pen.text((_MARGIN, top), f"the prompt, {seq} tokens", fill=_INK, font=font)
    legend = f"gray: text   colour: rows of an item   bar above: first token of a chunk of {chunk}"
    pen.text((_MARGIN, top + 26), legend, fill=_INK, font=small)
    for token in range(seq):
        row, column = divmod(token, columns)
        left, upper = _MARGIN + column * (_CELL + _GAP), top + 60 + row * (_CELL + 5)
        whose = int(owner[token])
        colour = _TEXT_CELL if whose < 0 else _ITEM_COLOURS[whose % len(_ITEM_COLOURS)]
        pen.rectangle((left, upper, left + _CELL - 1, upper + _CELL - 1), fill=colour)
        if token % chunk == 0:
            pen.rectangle((left, upper - 3, left + _CELL - 1, upper - 2), fill=_INK)
