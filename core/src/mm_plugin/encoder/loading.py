"""Vision towers built on the meta device and filled with a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mm_plugin.checkpoint import Checkpoint, check_tensors
from mm_plugin.errors import UnattributedError

Module = TypeVar("Module", bound=torch.nn.Module)


# The tensors that a module computes itself and does not save, by their full names; given the module, still on the meta device.
Computed = Callable[[torch.nn.Module], Mapping[str, torch.Tensor]]


def load_tower(
    make: Callable[[], Module],
    checkpoint: Checkpoint,
    prefixes: Sequence[str],
    *,
    device: Any,
    dtype: Any,
    computed: Computed | None = None,
) -> Module:
    """A module with a checkpoint's weights, in inference mode. Reads no other tensor and holds no weight twice.

    Whatever a module computes in its constructor and does not save, such as rotary frequencies or position ids, has no value on
    the meta device: `computed` gives it.

    Args:
        make: constructs the module; called while the meta device is in force.
        checkpoint: the opened checkpoint.
        prefixes: under which its tensors may be found, such as `("visual.", "model.visual.")`.
        device: torch device.
        dtype: torch dtype of floating-point tensors; None keeps the checkpoint's own.
        computed: takes the module and returns the tensors that no file holds, by their full names; they are moved to `device` and
            keep their dtype.

    Raises:
        UsageError: the checkpoint lacks a tensor of the module, or has an unexpected one, or one of another shape.
        UnattributedError: a tensor that no file holds is not given; the message names each.
    """
    what = f"{checkpoint.folder}: its tensors under {' or '.join(prefixes)} are not those of its vision tower"
    return fill_tower(
        make,
        lambda: checkpoint.tensors(prefixes, device=device, dtype=dtype),
        what=what,
        computed=None if computed is None else lambda tower: _moved(computed(tower), device),
    )


def fill_tower(
    make: Callable[[], Module],
    read: Callable[[], Mapping[str, torch.Tensor]],
    *,
    what: str,
    computed: Computed | None = None,
) -> Module:
    """As `load_tower`, for modules whose tensors have no common prefix.

    Args:
        make: constructs the module; called while the meta device is in force.
        read: returns the tensors by the module's own names, on their device; called after `make`.
        what: first part of the error message: which tensors are not the module's.
        computed: as for `load_tower`, on their device.

    Raises:
        UsageError: a tensor is missing, unexpected, or of another shape.
        UnattributedError: a tensor that no file holds is not given, or one is given that is not such a tensor.

    >>> weights = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
    >>> fill_tower(lambda: torch.nn.Linear(2, 1), lambda: weights, what="not a tower")(torch.ones(2))
    tensor([2.])
    """
    with torch.device("meta"):
        module = make()
    tensors = read()
    check_tensors(tensors, module.state_dict(), what=what)
    module.load_state_dict(tensors, strict=True, assign=True)
    if computed is not None:
        _give(module, computed(module))
    left = without_memory(module)
    if left:
        raise UnattributedError(
            f"{type(module).__name__}: expected a value for every tensor, got none for {', '.join(left)}, which no file holds; "
            "give what the constructor computes: load_tower(..., computed=lambda tower: {name: tensor})"
        )
    return module.eval().requires_grad_(False)


def _moved(tensors: Mapping[str, torch.Tensor], device: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _give(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put computed tensors where the module has them without memory."""
    left = without_memory(module)
    for name, tensor in tensors.items():
        if name not in left:
            raise UnattributedError(
                f"{type(module).__name__}: computed gives {name!r}; expected one of those without a value: "
                f"{', '.join(left) or 'none'}"
            )
        owner, _, last = name.rpartition(".")
        part = module.get_submodule(owner)
        there = getattr(part, last)
        if tuple(tensor.shape) != tuple(there.shape):
            raise UnattributedError(
                f"{type(module).__name__}: computed gives {name!r} {list(tensor.shape)}, expected {list(there.shape)}"
            )
        setattr(part, last, torch.nn.Parameter(tensor) if isinstance(there, torch.nn.Parameter) else tensor)


def without_memory(value: Any) -> list[str]:
    """Names of the tensors on the meta device, which have a shape and no values, that an object holds.

    Parameters, buffers and plain attributes of modules count, and of any other object its attributes: modules and tensors, in lists
    and mappings too.

    Args:
        value: a module, an encoder, or any other object.

    Example:
        >>> without_memory(torch.nn.Linear(2, 1, device="meta"))
        ['weight', 'bias']
    """
    found: dict[str, None] = {}
    _search(value, "", found, set(), 0)
    return list(found)


_DEEPEST = 6  # containers and objects below one another, modules not counted


def _search(value: Any, name: str, found: dict[str, None], seen: set[int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            found[name] = None
        return
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        for prefix, module in value.named_modules():
            seen.add(id(module))
            own = {**module._parameters, **module._buffers, **_plain(module)}  # noqa: SLF001 - with those of None and the unsaved
            for last, part in own.items():
                if not isinstance(part, torch.nn.Module):
                    _search(part, ".".join(filter(None, (name, prefix, last))), found, seen, depth + 1)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _search(part, f"{name}[{key!r}]", found, seen, depth + 1)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _search(part, f"{name}[{index}]", found, seen, depth + 1)
    elif depth == 0:
        for last, part in _plain(value).items():
            _search(part, last, found, seen, depth + 1)


def _plain(value: Any) -> dict[str, Any]:
    """Attributes of an object, those of `torch.nn.Module` itself left out."""
    return {name: part for name, part in getattr(value, "__dict__", {}).items() if name not in _OF_MODULES}


_OF_MODULES = frozenset(vars(torch.nn.Module()))
