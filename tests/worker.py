"""What a worker process does with tasks: opens each model once, prepares, and sends results back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mm_plugin
from mm_plugin import wire
from mm_plugin.tasks import ModelRef


@functools.cache
def registry() -> mm_plugin.Registry:
    return mm_plugin.discover(mm_plugin.Settings(threads=2))


_OPEN: list[tuple[ModelRef, mm_plugin.Processor]] = []


def opened(ref: ModelRef) -> mm_plugin.Processor:
    for known, processor in _OPEN:
        if known == ref:
            return processor
    _OPEN.append((ref, registry().load_processor(**ref.arguments())))
    return _OPEN[-1][1]


def prepare(tasks: Sequence[Any]) -> list[Any]:
    return opened(tasks[0].model).prepare_tasks(tasks)


def prepare_packed(data: bytes) -> bytes:
    """The same over the wire: tasks in, results out."""
    return b"".join(wire.pack(prepare(wire.unpack(data))))
