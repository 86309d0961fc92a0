"""Draws a processed prompt: each photograph with the grid of its rows, and the prompt as a strip of coloured tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from mm_plugin.structs import MultimodalProcessorOutput
from mm_plugin.testing import RowBoxes

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_WIDTH, _MARGIN, _CELL, _GAP = 1200, 24, 10, 1
_PAPER, _INK, _TEXT_CELL = (250, 249, 246), (40, 40, 46), (176, 176, 182)
# Hues that differ in lightness too, for readers who see few colours; they repeat after six items.
_ITEM_COLOURS = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0))


def draw(
    photographs: Sequence[tuple[str, bytes, RowBoxes]], output: MultimodalProcessorOutput, *, chunk: int
) -> Image.Image:
    """The picture of one request.

    Args:
        photographs: for each item its name, its file, and where its rows lie.
        output: the processed request.
        chunk: tokens in a prefill chunk; the first token of each is marked.

    Returns:
        An RGB image.
    """
    font, small = ImageFont.load_default(size=18), ImageFont.load_default(size=14)
    panels = [_panel(photo, index, len(photographs), font, small) for index, photo in enumerate(photographs)]
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


def _panel(
    photo: tuple[str, bytes, RowBoxes],
    index: int,
    count: int,
    font: Font,
    small: Font,
) -> Image.Image:
    name, data, layout = photo
    room = (_WIDTH - _MARGIN) // max(1, min(count, 4)) - _MARGIN
    scale = min(room / layout.width, 420 / layout.height, 1.5)
    width, height = max(1, round(layout.width * scale)), max(1, round(layout.height * scale))
    with Image.open(io.BytesIO(data)) as opened:
        picture = ImageOps.exif_transpose(opened).convert("RGB").resize((width, height))
    panel = Image.new("RGB", (room, height + 52), _PAPER)
    panel.paste(picture, (0, 0))
    pen = ImageDraw.Draw(panel, "RGBA")
    colour = _ITEM_COLOURS[index % len(_ITEM_COLOURS)]
    for left, top, right, bottom in layout.boxes:
        box = (left * scale, top * scale, right * scale - 1, bottom * scale - 1)
        pen.rectangle(box, outline=(*colour, 150))
    pen.rectangle((0, 0, width - 1, height - 1), outline=colour, width=3)
    pen.text((0, height + 6), name, fill=colour, font=font)
    pen.text(
        (0, height + 30),
        f"resized to {layout.height} x {layout.width} pixels, {len(layout.boxes)} rows",
        fill=_INK,
        font=small,
    )
    return panel


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
