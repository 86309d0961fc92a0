"""`python -m mm_plugin_transformers_auto.table FILE`: what the fallback makes of each family, measured, as a page of docs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from mm_plugin import (
    AudioSamples,
    ForwardBatch,
    MultimodalInputs,
    Registry,
    RequestMedia,
    UsageError,
    discover,
    embed_mm_inputs,
)
from mm_plugin_transformers_auto.testing import FAMILIES, Family, make_checkpoint

# (height, width) of two images, and samples of two audio inputs, at 16,000 a second.
SIZES = ((161, 184), (337, 90))
SAMPLES = (16_000, 9_001)
# Differences are told by these bounds: what lies below the first is another number on every machine.
BOUNDS = (1e-5, 1e-4)

HEAD = """# Models of the fallback

What `mm-plugin-transformers-auto` makes of each family of models that it is proved on. The page is written by `make tables`, and a
test compares it with what is measured. Every checkpoint is a tiny one with random weights, made on the spot by
`mm_plugin_transformers_auto.testing`; the processor and the model's code are transformers' own.

- **media**: `one by one` means that each media input is prepared and cached by itself, whatever stands beside it; `as a whole` that
  what it becomes was seen to depend on the request, which is then prepared together and not remembered.
- **rows**: of an image of 161 x 184 pixels (height x width) and one of 337 x 90; of audio of one second and of 0.56, or of
  the first alone where a request may have but one. They belong to the tiny model: a released one has more.
- **tokens**: of the whole prompt with them. The ids equal those of the processor, or the page could not be written.
- **largest difference**: of the language model's logits from the model's own forward on the same request.

| family | model class | stands for | media | rows | tokens | largest difference |
|---|---|---|---|---|---|---|
"""
TAIL = """
Where a family needs torchvision, it is because its processor (often for the sake of videos) cannot be opened without; the error
and the plugin's record say so. The tests of this plugin run those families where torchvision is installed. Videos are not served.
"""


def write(file: Path) -> None:
    """Measure every family and write the page."""
    transformers.utils.logging.disable_progress_bar()
    with discover() as registry, tempfile.TemporaryDirectory() as folder:
        rows = [_row(registry, family, Path(folder) / name) for name, family in FAMILIES.items()]
    file.write_text(HEAD + "".join(rows) + TAIL, encoding="utf-8")


def _row(registry: Registry, family: Family, folder: Path) -> str:
    if family.needs:
        cells = [f"needs {', '.join(family.needs)}", "", "", ""]
    else:
        make_checkpoint(folder, family.name)
        try:
            cells = _measure(registry, family, folder)
        except UsageError as error:
            cells = [f"refused: {error.message.partition(': ')[2] or error.message}", "", "", ""]
    return f"| {' | '.join([family.name, f'`{family.architecture}`', family.shows, *cells])} |\n".replace("  |", " |")


def _measure(registry: Registry, family: Family, folder: Path) -> list[str]:
    processor = registry.load_processor(folder, plugin="transformers_auto")
    encoder = registry.load_encoder(folder, plugin="transformers_auto")
    reference = transformers.AutoProcessor.from_pretrained(str(folder), trust_remote_code=False)
    model = getattr(transformers, family.architecture).from_pretrained(str(folder), dtype=torch.float32).eval()
    count, random = min(2, family.most), np.random.default_rng(0)
    prompt = family.prompt(count)
    arguments: dict[str, Any]
    given: dict[str, Any]
    if family.image:
        images = [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES[:count]]
        given, arguments = {"images": images}, {"images": images}
    else:
        audios = [(random.standard_normal(length) * 0.1).astype(np.float32) for length in SAMPLES[:count]]
        given = {"audios": [AudioSamples(samples, 16_000) for samples in audios]}
        arguments = {"audio": audios, "sampling_rate": 16_000}
    output = processor.process(prompt, **given)
    whole = dict(reference(text=[prompt], return_tensors="pt", **arguments))
    whole.pop("labels", None)
    if output.input_ids.tolist() != whole["input_ids"][0].tolist():
        raise AssertionError(f"{family.name}: the ids are not the processor's")
    ids = torch.from_numpy(output.input_ids)
    batch = ForwardBatch([RequestMedia(MultimodalInputs.from_processor_output(output))], [0], [len(ids)])
    step = embed_mm_inputs(ids, batch, model.get_input_embeddings(), encoder)
    if step.failed:
        raise step.failed[0].error
    marks = {name: whole[name] for name in ("token_type_ids", "mm_token_type_ids") if name in whole}
    with torch.inference_mode():
        expected = model(**whole).logits
        found = model(inputs_embeds=step.input_embeds[None], **marks).logits
    largest = float((found - expected).abs().max())
    bound = next((f"below {bound:g}" for bound in BOUNDS if largest < bound), f"{largest:.1g}")
    counts = " + ".join(str(item.num_tokens) for item in output.mm_items)
    return [processor.spec.notes["media"], counts, str(len(ids)), bound]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
