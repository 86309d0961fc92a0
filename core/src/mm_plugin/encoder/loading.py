"""Vision towers built on the meta device and filled with a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mm_plugin.checkpoint import Checkpoint, check_tensors

Module = TypeVar("Module", bound=torch.nn.Module)


def load_tower(
    make: Callable[[], Module], checkpoint: Checkpoint, prefixes: Sequence[str], *, device: Any, dtype: Any
) -> Module:
    """A module with a checkpoint's weights, in inference mode. Reads no other tensor and holds no weight twice.

    Whatever a module computes in its constructor and does not save, such as rotary frequencies, stays on the meta device; the
    encoder has to compute it again.

    Args:
        make: constructs the module; called while the meta device is in force.
        checkpoint: the opened checkpoint.
        prefixes: under which its tensors may be found, such as `("visual.", "model.visual.")`.
        device: torch device.
        dtype: torch dtype of floating-point tensors; None keeps the checkpoint's own.

    Raises:
        UsageError: the checkpoint lacks a tensor of the module, or has an unexpected one, or one of another shape.
    """
    what = f"{checkpoint.folder}: its tensors under {' or '.join(prefixes)} are not those of its vision tower"
    return fill_tower(make, lambda: checkpoint.tensors(prefixes, device=device, dtype=dtype), what=what)


def fill_tower(make: Callable[[], Module], read: Callable[[], Mapping[str, torch.Tensor]], *, what: str) -> Module:
    """As `load_tower`, for modules whose tensors have no common prefix.

    Args:
        make: constructs the module; called while the meta device is in force.
        read: returns the tensors by the module's own names, on their device; called after `make`.
        what: first part of the error message: which tensors are not the module's.

    Raises:
        UsageError: a tensor is missing, unexpected, or of another shape.

    >>> weights = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    >>> fill_tower(lambda: torch.nn.Linear(2, 1), lambda: weights, what="not a tower")(torch.ones(2))
    tensor([2.])
    """
    with torch.device("meta"):
        module = make()
    tensors = read()
    check_tensors(tensors, module.state_dict(), what=what)
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.eval().requires_grad_(False)
