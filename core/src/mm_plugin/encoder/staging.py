"""A pinned buffer through which features reach the device, so that a copy neither waits for the device nor pins memory again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mm_plugin.forking import new_lock

DEFAULT_BYTES = 64 * 1024 * 1024


class StagingBuffer:
    """Copies host tensors to one device, in pieces through a pinned buffer of fixed size. Final; thread-safe.

    The buffer has two halves that are used in turn. A half is written again only when the copy out of it is done, which an event
    reports. The copy is queued on the current stream, so on a busy one the host waits for the work before it; with two halves,
    that is the work before the copy before last.

    A bound `Encoder` on a CUDA device has one. A server that passes a mapping of callables makes one per device and passes it as
    `embed_mm_inputs(..., staging=buffer)`.

    Args:
        device: torch device that receives the tensors. On a device without pinned memory (the CPU), tensors are moved as they are.
        num_bytes: size of the buffer, bytes.
        allocate: makes the pinned buffer; for tests.
        event: makes an event with `record()` and `synchronize()`; for tests.

    Example:
        >>> import torch
        >>> from mm_plugin.encoder import StagingBuffer
        >>> StagingBuffer("cpu").send([torch.arange(3)])
        [tensor([0, 1, 2])]
    """

    def __init__(
        self,
        device: Any,
        num_bytes: int = DEFAULT_BYTES,
        *,
        allocate: Callable[[int], torch.Tensor] | None = None,
        event: Callable[[], Any] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._half = max(1, num_bytes // 2)
        self._allocate = allocate or (_pinned if self.device.type == "cuda" else None)
        self._event = event or torch.cuda.Event
        self._halves: list[tuple[torch.Tensor, Any]] = []
        self._turn = 0
        self._lock = new_lock()

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors on the device, of the same dtypes and shapes.

        Args:
            tensors: of any dtype and shape; not changed. Those that are not on the host are moved without the buffer.
        """
        with self._lock:
            return [self._send(tensor) for tensor in tensors]

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or self._allocate is None:
            return tensor.to(self.device, non_blocking=True)
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        out = torch.empty(source.shape, dtype=torch.uint8, device=self.device)
        for start in range(0, len(source), self._half):
            part = source[start : start + self._half]
            buffer, event = self._take()
            buffer[: len(part)].copy_(part)
            out[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
            event.record()
        return out.view(tensor.dtype).reshape(tensor.shape)

    def _take(self) -> tuple[torch.Tensor, Any]:
        """The next half, once the last copy out of it is done."""
        if not self._halves:
            assert self._allocate is not None
            self._halves = [(self._allocate(self._half), self._event()) for _ in range(2)]
        buffer, event = self._halves[self._turn]
        self._turn = 1 - self._turn
        event.synchronize()  # one that was never recorded is done
        return buffer, event


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
