"""`mm-plugin demo`: processes and embeds real images, offline, and shows and checks what comes out."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import mm_plugin
from mm_plugin.cli.drawing import draw, row_view, video_view
from mm_plugin.cli.list import print_plugins
from mm_plugin.demo.base import Demo, DemoVideo, DrawsViews, ShowsVideos, View, sample_images
from mm_plugin.errors import PluginLoadError, UsageError
from mm_plugin.events import EncodeBatch, Event, ItemKeyed
from mm_plugin.media.images import open_image
from mm_plugin.media.types import SampledVideo
from mm_plugin.media.video import open_video
from mm_plugin.processor.mixins import AcceptsVideos
from mm_plugin.registry.registry import Registry, discover
from mm_plugin.settings import Settings
from mm_plugin.testing.embedding import embed_in_chunks

if TYPE_CHECKING:
    from mm_plugin.inputs.processed import MultimodalProcessorOutput
    from mm_plugin.items import MultimodalDataItem
    from mm_plugin.processor.processor import Processor

# Items that fit side by side in a terminal of 80 columns.
_ITEMS_ABREAST = 2
_FRAMES_NAMED = 12


class _Counts:
    """An observer that counts what the demo reports."""

    def __init__(self) -> None:
        self.prepared = self.repeated = self.encoder_calls = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, ItemKeyed):
            self.repeated += event.cached
            self.prepared += not event.cached
        elif isinstance(event, EncodeBatch):
            self.encoder_calls += 1

    def take(self) -> tuple[int, int, int]:
        """(media inputs prepared, media inputs found in the cache, encoder calls) since the last call."""
        counts = (self.prepared, self.repeated, self.encoder_calls)
        self.prepared = self.repeated = self.encoder_calls = 0
        return counts


def demo(
    model: str | None,
    *,
    images: Sequence[Path],
    videos: Sequence[Path],
    chunk: int,
    out: Path,
    rebuild: bool,
) -> int:
    """Process media inputs, embed the prompt as a whole and in chunks, compare with the model's own forward, and draw.

    Args:
        model: name of the plugin to show; the first that has a demo where None.
        images: image files, in place of the bundled ones.
        videos: video files, after the images; with a video and no image, the bundled images are left out too.
        chunk: length of a prefill chunk, tokens.
        out: PNG file to write.
        rebuild: build the tiny checkpoint again.

    Returns:
        0 if every comparison holds, else 1.
    """
    console = Console()
    _check_writable(out)
    shown_videos = [(file.name, _read(file, "video")) for file in videos]
    shown_images = [(file.name, _read(file, "image")) for file in images]
    if not shown_images and not shown_videos:
        shown_images = sample_images()
    with discover() as registry:
        print_plugins(console, registry.plugins)
        name, shown = _choose(registry, model)
        if shown_videos and not isinstance(shown, ShowsVideos):
            raise UsageError(f"--video: the demo of {name} shows images only", argument="video")
        show = _Show(console, registry, shown, shown_images, shown_videos, chunk)
        with console.status(f"{name}: building the checkpoint"):
            folder = _checkpoint(registry, name, shown, rebuild=rebuild)
        with console.status(f"{name}: opening the model (this imports torch and transformers)"):
            show.open(folder)
        with console.status(f"{name}: processing"):
            show.process()
        with console.status(f"{name}: embedding and comparing"):
            show.compare()
            show.repeat()
            show.change_a_pixel()
        show.paint(out)
    console.print("[green]everything agrees[/]" if show.agrees else "[red]something differs[/]")
    return 0 if show.agrees else 1


class _Show:
    """The steps of the demo, in order."""

    def __init__(
        self,
        console: Console,
        registry: Registry,
        shown: Demo,
        images: Sequence[tuple[str, bytes]],
        videos: Sequence[tuple[str, bytes]],
        chunk: int,
    ) -> None:
        self._console, self._registry, self._demo, self._chunk = console, registry, shown, chunk
        self._names = [name for name, _ in (*images, *videos)]
        self._images, self._videos = [_plain_png(data) for _, data in images], [data for _, data in videos]
        self._shown_videos: list[DemoVideo] = []
        self._counts = _Counts()
        self.agrees = True
        self._output: MultimodalProcessorOutput
        self._processor: Processor

    def open(self, folder: Path) -> None:
        """Open the processor, the encoder and the whole reference model from one folder."""
        self._registry.observers.add(self._counts)
        self._folder = folder
        self._processor = self._registry.load_processor(folder, **self._demo.options)
        self._encoder = self._registry.load_encoder(folder)
        self._model = self._demo.open_model(folder)
        self._embedding = self._demo.input_embedding(self._model)
        self._prompt = self._demo.prompt(len(self._images))
        if isinstance(self._demo, ShowsVideos) and self._videos:
            self._prompt = self._demo.video_prompt(len(self._images), len(self._videos))
        options = ", ".join(f"{key}={value}" for key, value in self._demo.options.items())
        self._console.print(f"checkpoint  {escape(str(folder))}  {escape(options)}", highlight=False)

    def process(self) -> None:
        """Process the prompt, and print a column for each item."""
        self._output = output = self._process(self._images)
        self._counts.take()
        self._console.print(f"a prompt of {len(output.input_ids)} tokens, {len(output.mm_items)} items")
        of_images, of_videos = output.mm_items[: len(self._images)], output.mm_items[len(self._images) :]
        names = self._names[len(self._images) :]
        self._shown_videos = [self._video(*entry) for entry in zip(names, self._videos, of_videos, strict=True)]
        facts = [self._facts(*entry) for entry in zip(self._images, of_images, strict=True)]
        facts += map(self._video_facts, self._shown_videos)
        for first in range(0, len(facts), _ITEMS_ABREAST):
            shown = slice(first, first + _ITEMS_ABREAST)
            table = Table(
                "item", *map(escape, self._names[shown]), title="Items", title_justify="left", show_lines=True
            )
            for label in dict.fromkeys(label for entry in facts[shown] for label in entry):
                table.add_row(label, *(escape(entry.get(label, "")) for entry in facts[shown]))
            self._console.print(table)

    def _process(self, images: Sequence[bytes]) -> MultimodalProcessorOutput:
        return self._processor.process(self._prompt, images, self._videos)

    def _facts(self, data: bytes, item: MultimodalDataItem) -> dict[str, str]:
        boxes = self._demo.embedding_boxes(self._processor, item)
        with Image.open(io.BytesIO(data)) as image:
            size = f"{image.height} x {image.width}"
        return {"size": size, "resized": f"{boxes.height} x {boxes.width}", **self._common_facts(item)}

    def _video(self, name: str, data: bytes, item: MultimodalDataItem) -> DemoVideo:
        """A video with the frames that the plugin chose."""
        model = self._processor.model
        assert isinstance(model, AcceptsVideos)
        size = open_video(data, path="video", settings=Settings()).probe()
        chosen = model.sample(size, model.options)
        return DemoVideo(
            name, data, SampledVideo(size.height, size.width, chosen.indices, chosen.timestamps, chosen.fps), item
        )

    def _video_facts(self, shown: DemoVideo) -> dict[str, str]:
        times = ", ".join(f"{time:.2f}" for time in shown.size.timestamps[:_FRAMES_NAMED])
        more = ", ..." if shown.size.frames > _FRAMES_NAMED else ""
        boxes = self._demo.embedding_boxes(self._processor, shown.item)
        return {
            "size": f"{shown.size.height} x {shown.size.width}",
            "resized": f"{boxes.height} x {boxes.width}",
            "frames": f"{shown.size.frames}, {shown.size.fps:.3f} per second",
            "at seconds": times + more,
            **self._common_facts(shown.item),
        }

    def _common_facts(self, item: MultimodalDataItem) -> dict[str, str]:
        fields = {key: str(np.asarray(value).tolist()) for key, value in item.model_specific_data.items()}
        return {
            **fields,
            "tokens": str(item.num_tokens),
            "span": ", ".join(f"{start}..{end}" for start, end in item.offsets),
            "identity": (item.identity or b"").hex()[:24] + "...",
            "sentinels": "\n".join(map(str, item.padding_values())),
        }

    def compare(self) -> None:
        """Compare the embeddings of the whole prompt, of the prompt in chunks, and of the model's own library."""
        output = self._output
        whole = self._embed(output, len(output.input_ids))
        calls_whole = self._counts.take()[2]
        chunked = self._embed(output, self._chunk)
        calls_chunked = self._counts.take()[2]
        if isinstance(self._demo, ShowsVideos) and self._shown_videos:
            reference = self._demo.video_reference(self._model, self._folder, output, self._images, self._shown_videos)
        else:
            reference = self._demo.reference(self._model, self._folder, output.input_ids, self._images)
        logits = self._demo.logits(self._model, whole, output.mrope_positions)
        parts = -(-len(output.input_ids) // self._chunk)
        table = Table(title="Embeddings", title_justify="left")
        for column in ("comparison", "largest difference", "allowed", "encoder calls"):
            table.add_column(column)
        self._row(
            table,
            f"{parts} chunks of {self._chunk} against one pass",
            _difference(chunked, whole),
            1e-5,
            calls_chunked,
        )
        name = self._demo.reference_name
        self._row(table, f"embeddings against {name}", _difference(whole, reference.input_embeds), 1e-4, calls_whole)
        self._row(table, f"logits against {name}", _difference(logits, reference.logits), 1e-4)
        if reference.position_ids is not None and output.mrope_positions is not None:
            largest = int(np.abs(output.mrope_positions - reference.position_ids).max())
            self._row(table, f"positions against {name}", largest, 0)
        self._console.print(table)

    def repeat(self) -> None:
        """Send the same request again: nothing is decoded and nothing is encoded."""
        again = self._process(self._images)
        self._embed(again, len(again.input_ids), cached=True)
        self._counts.take()
        again = self._process(self._images)
        self._embed(again, len(again.input_ids), cached=True)
        decoded, repeated, calls = self._counts.take()
        same = all(a.identity == b.identity for a, b in zip(again.mm_items, self._output.mm_items, strict=True))
        self._say(
            same and decoded == 0 and calls == 0,
            f"the same {repeated} media inputs again: {decoded} decoded, {calls} encoder calls, identities "
            + ("equal" if same else "DIFFER"),
        )

    def change_a_pixel(self) -> None:
        """Change one pixel of the first image: its identity changes, and the cache ids differ from its first token on."""
        if not self._images:
            return
        changed = self._process([_one_pixel_off(self._images[0]), *self._images[1:]])
        self._counts.take()
        first, before = changed.mm_items[0], self._output.mm_items[0]
        common = _common_prefix(changed.padded_input_ids, self._output.padded_input_ids)
        start = before.offsets[0][0]
        self._say(
            first.identity != before.identity and common == start,
            f"one pixel of {self._names[0]} changed: identity {(first.identity or b'').hex()[:16]}..., "
            f"the cache ids agree for {common} tokens, the image begins at {start}",
        )

    def paint(self, file: Path) -> None:
        """Draw the items with their grids, and the prompt as a strip of tokens."""
        images = zip(self._names, self._images, self._output.mm_items, strict=False)
        views = [self._views(*entry) for entry in images]
        views += [[video_view(shown, self._time_axis(shown.item))] for shown in self._shown_videos]
        draw(views, self._output, chunk=self._chunk, positions=bool(self._shown_videos)).save(file, format="PNG")
        self._console.print(f"image  {escape(str(file))}", highlight=False)

    def _time_axis(self, item: MultimodalDataItem) -> np.ndarray | None:
        """The time axis of an item's positions, a value for each temporal patch."""
        if self._output.mrope_positions is None:
            return None
        ((start, end),) = item.offsets
        return np.unique(self._output.mrope_positions[0, start : end + 1])

    def _views(self, name: str, data: bytes, item: MultimodalDataItem) -> Sequence[View]:
        if isinstance(self._demo, DrawsViews):
            return self._demo.views(self._processor, item, name, data)
        return [row_view(name, data, self._demo.embedding_boxes(self._processor, item))]

    def _embed(self, output: MultimodalProcessorOutput, size: int, *, cached: bool = False) -> Any:
        cache = self._registry.embedding_cache if cached else None
        return embed_in_chunks(output, self._embedding, self._encoder, size=size, cache=cache)

    def _row(self, table: Table, what: str, found: float, allowed: float, calls: int | None = None) -> None:
        good = found <= allowed
        self.agrees &= good
        shown = f"[{'green' if good else 'red'}]{found:.3g}[/]"
        table.add_row(what, shown, f"{allowed:g}", "" if calls is None else str(calls))

    def _say(self, good: bool, text: str) -> None:
        self.agrees &= good
        self._console.print(
            f"[{'green' if good else 'red'}]{'yes' if good else 'NO'}[/]  {escape(text)}", highlight=False
        )


def _choose(registry: Registry, model: str | None) -> tuple[str, Demo]:
    """The plugin to show, and its demo."""
    tried = []
    for record in registry.plugins:
        if model not in (None, record.name) or (model is None and record.state != "available"):
            continue
        try:
            cls = registry.load_declared(record.name, "demo")
        except PluginLoadError:
            if model is not None:
                raise
            continue  # its record is in the table above; another plugin may have a demo
        if cls is not None:
            return record.name, cls()
        tried.append(record.name)
    if model is not None and not tried:
        known = ", ".join(record.name for record in registry.plugins) or "none"
        raise UsageError(f"no plugin {model!r} is installed; installed: {known}", argument="model")
    raise UsageError(
        f"no demo in {', '.join(tried)}" if tried else "no plugin is installed; try: pip install mm-plugin-qwen2vl",
        argument="model",
    )


def _checkpoint(registry: Registry, name: str, shown: Demo, *, rebuild: bool) -> Path:
    """The plugin's tiny checkpoint, built once and kept in the user's cache folder."""
    record = next(record for record in registry.plugins if record.name == name)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mm-plugin" / "demo"
    folder = root / f"{name}-{record.version}-{mm_plugin.__version__}"
    if rebuild:
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            # Built in another folder and renamed, so that an interrupted build is never used.
            built = Path(tempfile.mkdtemp(prefix="building-", dir=root))
        except OSError as error:
            message = f"{root} cannot be written: {error.strerror}; set XDG_CACHE_HOME"
            raise UsageError(message, argument="cache") from error
        try:
            shown.make_checkpoint(built)
            built.rename(folder)
        except BaseException:
            shutil.rmtree(built, ignore_errors=True)
            raise
    return folder


def _read(file: Path, argument: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"--{argument}: {file} cannot be read: {error.strerror}", argument=argument) from error


def _check_writable(file: Path) -> None:
    """Refuse a file that cannot be written, before anything takes time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {file.parent} cannot be created: {error.strerror}", argument="out") from error
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"--out: {file} cannot be written", argument="out")


def _plain_png(data: bytes) -> bytes:
    """An image as the framework decodes it, as a PNG: the reference gets the same pixels, upright and opaque."""
    source = open_image(data, path="image", settings=Settings())
    out = io.BytesIO()
    Image.fromarray(source.decode().pixels).save(out, "PNG")
    return out.getvalue()


def _one_pixel_off(data: bytes) -> bytes:
    """The same image as a PNG, with one channel of its middle pixel inverted."""
    with Image.open(io.BytesIO(data)) as opened:
        image = opened.convert("RGB")
    middle = (image.width // 2, image.height // 2)
    red, green, blue = (int(level) for level in np.asarray(image)[middle[1], middle[0]])
    image.putpixel(middle, (255 - red, green, blue))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _difference(left: Any, right: Any) -> float:
    return float((left - right).abs().max())
