"""Random numbers and bytes of one file."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any


class Pieces:
    """Random numbers and bytes of one file, more or less hostile: few faults may precede what lies deep."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.level = self.random.choice([0.0, 0.01, 0.03, 0.1])

    def number(self, bits: int) -> int:
        """A whole number of so many bits: small, at an edge, or any."""
        chance = self.random.random()
        if chance < 0.45 or not self.flag(0.1 + 6 * self.level):
            return self.random.randrange(17)
        if chance < 0.7:
            edge = 1 << self.random.randrange(bits)
            return min((1 << bits) - 1, max(0, edge + self.random.randrange(-1, 2)))
        if chance < 0.85:
            return (1 << bits) - 1 - self.random.randrange(3)
        return self.random.randrange(1 << bits)

    def size(self, true: int, bits: int) -> int:
        """The size that a piece says it has: the true one, mostly."""
        return self.number(bits) if self.flag(self.level) else true

    def side(self) -> int:
        if not self.flag(0.1 + 3 * self.level):
            return self.random.choice([16, 64])
        return self.random.choice([0, 1, 2, 7, 1000, 4096, 65535, (1 << 31) - 1])

    def data(self, most: int = 64) -> bytes:
        return self.random.randbytes(self.random.randrange(max(1, most)))

    def flag(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def times(self) -> int:
        return self.random.choice([0, 1, 1, 1, 2, 3, 8, 200 if self.flag(0.1) else 4])

    def big(self, bits: int) -> bytes:
        return self.number(bits).to_bytes(bits // 8, "big")

    def little(self, bits: int) -> bytes:
        return self.number(bits).to_bytes(bits // 8, "little")

    def join(self, *makers: Callable[[], bytes]) -> bytes:
        """Pieces in order, in which some are missing, repeated, or out of place."""
        parts = [made() for made in makers]
        if self.flag(2 * self.level):
            self.random.shuffle(parts)
        if self.flag(2 * self.level):
            parts += [self.random.choice(parts)] * self.times()
        return b"".join(part for part in parts if not self.flag(self.level / 2))
