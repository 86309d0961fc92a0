"""`Encoded`: what an encoder returns for one item."""

from __future__ import annotations

from typing import Any

import msgspec

from mm_plugin.arrays import is_dense, is_tensor


class Encoded(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """What an encoder returns for one item. An encoder that has embeddings alone may return the tensor itself.

    Attributes:
        embeddings: [num_tokens, hidden], floating point, torch, on the encoder's device.
        deepstack: [n_layers, num_tokens, hidden], same dtype and device, for models that add embeddings in several layers of the
            language model; else None.
        kept: [num_tokens] int64, same device: the rows that a pruning encoder kept of all rows of the item; else None.

    Example:
        >>> import torch
        >>> from mm_plugin import Encoded
        >>> encoded = Encoded(torch.ones(6, 8), deepstack=torch.zeros(2, 6, 8))
        >>> part = encoded.rows(4, 6)
        >>> tuple(part.embeddings.shape), tuple(part.deepstack.shape), part.kept
        ((2, 8), (2, 2, 8), None)
    """

    embeddings: Any
    deepstack: Any = None
    kept: Any = None

    def fits(self, num_tokens: int, hidden: int | None, dtype: Any, device: Any) -> bool:
        """Whether every part is what a step of this width, dtype and device writes for so many tokens.

        Args:
            num_tokens: embeddings of the item.
            hidden: width; None for any, the same for all parts.
            dtype: torch dtype.
            device: torch device.
        """
        if hidden is None and is_dense(self.embeddings) and len(self.embeddings.shape) == 2:
            hidden = self.embeddings.shape[1]
        for part, leading in ((self.embeddings, 0), (self.deepstack, 1)):
            if part is None and leading:
                continue
            if not is_dense(part) or not is_tensor(part) or part.ndim != 2 + leading:
                return False
            if (*part.shape[leading:], part.dtype, part.device) != (num_tokens, hidden, dtype, device):
                return False
        kept = self.kept
        if kept is None:
            return True
        good = is_dense(kept) and is_tensor(kept) and str(kept.dtype) == "torch.int64"
        return bool(good and tuple(kept.shape) == (num_tokens,) and kept.device == device)

    def rows(self, start: int, end: int) -> Encoded:
        """Rows `start:end` (half-open) of every part, as views."""
        return Encoded(
            self.embeddings[start:end],
            None if self.deepstack is None else self.deepstack[:, start:end],
            None if self.kept is None else self.kept[start:end],
        )
