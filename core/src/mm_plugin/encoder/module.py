"""An encoder as a `torch.nn.Module`, for engines whose models are trees of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, cast

import torch

from mm_plugin.encoder.base import Encoder
from mm_plugin.errors import UsageError
from mm_plugin.inputs.encoded import Encoded
from mm_plugin.items import Modality, MultimodalDataItem


class EncoderModule(torch.nn.Module):
    """A module that shows an encoder's own modules, with their parameters and buffers, to the model that holds it. Final.

    It cannot be moved or cast: cached embeddings are named by the weights and the dtype with which the encoder was loaded, and it
    may have computed tensors of its own from them. Whoever holds it calls `encoder` as before, in `embed_mm_inputs` and elsewhere.

    Args:
        encoder: as `Registry.load_encoder` returned it.

    Attributes:
        encoder: as given.

    Example:
        >>> import torch
        >>> from mm_plugin import Encoder, EncodesImages
        >>> from mm_plugin.encoder import EncoderModule
        >>> class Linear(Encoder, EncodesImages):
        ...     def __init__(self):
        ...         self.tower = torch.nn.Linear(4, 8)
        ...
        ...     @classmethod
        ...     def load(cls, checkpoint, device, dtype):
        ...         return cls()
        ...
        ...     def get_image_feature(self, items):
        ...         return [self.tower(item.feature) for item in items]
        >>> [name for name, _ in EncoderModule(Linear()).named_parameters()]
        ['tower.weight', 'tower.bias']
    """

    encoder: Encoder

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        if not isinstance(encoder, Encoder):
            raise UsageError(f"encoder: expected an Encoder, got {type(encoder).__name__}", argument="encoder")
        # An encoder may be a module itself, but is not a child: its parameters keep the names that they have in it.
        object.__setattr__(self, "encoder", encoder)
        parts = encoder.named_children() if isinstance(encoder, torch.nn.Module) else vars(encoder).items()
        for name, part in parts:
            if isinstance(part, torch.nn.Module):
                self.add_module(name.lstrip("_"), part)

    def forward(self, modality: Modality, items: Sequence[MultimodalDataItem]) -> Sequence[torch.Tensor | Encoded]:
        """See `Encoder.encode`."""
        return self.encoder.encode(modality, items)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda`, `half` and their like go through, also where they are called on a module above.

        Raises:
            UsageError: it would change a parameter's device or dtype.
        """
        first = next(iter(self.parameters()), None)
        if first is not None:
            with torch.no_grad():
                after = fn(first.detach().flatten()[:1])
            if (after.device, after.dtype) != (first.device, first.dtype):
                raise UsageError(
                    f"encoder: expected it to stay on {first.device} in {first.dtype}, got a move to {after.device} in "
                    f"{after.dtype}; load it there, with load_encoder(checkpoint, device=..., dtype=...)",
                    argument="encoder",
                )
        return cast("Self", super()._apply(fn, recurse))  # type: ignore[no-untyped-call]
