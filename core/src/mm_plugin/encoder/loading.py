"""A vision tower built on the meta device and filled from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mm_plugin.checkpoint import Checkpoint, check_tensors

Module = TypeVar("Module", bound=torch.nn.Module)


def load_tower(
    make: Callable[[], Module], checkpoint: Checkpoint, prefixes: Sequence[str], *, device: Any, dtype: Any
) -> Module:
    """A module with a checkpoint's weights, in inference mode; no other tensor is read, and no memory is taken twice.

    What a module computes in its constructor and stores nowhere, such as rotary frequencies, stays on the meta device: a tower
    that needs it makes it again.

    Args:
        make: constructs the module; called with the meta device in force.
        checkpoint: the opened checkpoint.
        prefixes: under which its tensors are found, such as `("visual.", "model.visual.")`.
        device: torch device.
        dtype: torch dtype of floating-point tensors; None keeps the checkpoint's own.

    Raises:
        UsageError: the checkpoint lacks a tensor of the module, has one too many, or one of another shape.
    """
    what = f"{checkpoint.folder}: its tensors under {' or '.join(prefixes)} are not those of its vision tower"
    return fill_tower(make, lambda: checkpoint.tensors(prefixes, device=device, dtype=dtype), what=what)


def fill_tower(make: Callable[[], Module], read: Callable[[], Mapping[str, torch.Tensor]], *, what: str) -> Module:
    """As `load_tower`, for a module whose tensors lie under no common beginnings.

    Args:
        make: constructs the module; called with the meta device in force.
        read: gives the tensors by the module's own names, on their device; called once the module is made.
        what: what is wrong where they are not the module's, for the message.

    Raises:
        UsageError: a tensor is missing, one is too many, or one has another shape.
    """
    with torch.device("meta"):
        module = make()
    tensors = read()
    check_tensors(tensors, module.state_dict(), what=what)
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.eval().requires_grad_(False)
