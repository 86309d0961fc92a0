"""The hook specifications. With `registry` the only importer of pluggy; hooks register declarations and never run in a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from mm_plugin.events import Observer
    from mm_plugin.identity.digests import DigestFunction
    from mm_plugin.spec import ModelSpec

PROJECT = "mm_plugin"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def mm_register_models() -> ModelSpec | Iterable[ModelSpec]:  # type: ignore[empty-body]
    """The models that this plugin serves.

    Each architecture and model type of a spec must be claimed in the distribution's entry points, in the groups
    `mm_plugin.architectures` and `mm_plugin.model_types`, and the other way round.
    """


@hookspec
def mm_register_observers() -> Mapping[str, Observer]:  # type: ignore[empty-body]
    """Observers by name; each name must be claimed in the group `mm_plugin.observers`.

    An observer is called with every event of `mm_plugin.events`, in the thread where it happens.
    """


@hookspec
def mm_register_stores() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Store factories by name; each name must be claimed in the group `mm_plugin.stores`.

    A factory takes `capacity_bytes` and returns a `mm_plugin.cache.store.Store`.
    """


@hookspec
def mm_register_digests() -> Mapping[str, DigestFunction]:  # type: ignore[empty-body]
    """Functions that hash on other devices, by device type such as `xpu`; each must be claimed in the group `mm_plugin.digests`.

    A function takes tensors [n] uint8 on one such device and returns BLAKE3-256 of each, 32 bytes. It is checked against the
    published test vectors before it is believed.
    """
