"""The hook specifications: hooks register declarations and never run in a request. Only `registry.loading` imports pluggy too."""

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

    The architectures and model types of the specs must be exactly those that the distribution's entry points claim in the
    groups `mm_plugin.architectures` and `mm_plugin.model_types`.

    Returns:
        One declaration, or several.
    """


@hookspec
def mm_register_observers() -> Mapping[str, Observer]:  # type: ignore[empty-body]
    """Observers by name; each name must be claimed in the group `mm_plugin.observers`.

    An observer is called with every event of `mm_plugin.events`, in the thread that emits it.
    """


@hookspec
def mm_register_stores() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Store factories by name; each name must be claimed in the group `mm_plugin.stores`.

    A factory takes `capacity_bytes` and returns a `mm_plugin.cache.store.Store`.
    """


@hookspec
def mm_register_digests() -> Mapping[str, DigestFunction]:  # type: ignore[empty-body]
    """Functions that hash on other devices, by device type such as `xpu`; each must be claimed in the group `mm_plugin.digests`.

    A function takes tensors [n] uint8 on one device of this type and returns BLAKE3-256 of each, 32 bytes. It is checked against
    the published test vectors before its results are used.
    """
