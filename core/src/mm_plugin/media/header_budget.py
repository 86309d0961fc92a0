"""The budget of a file's header: how many pieces may be looked at, and how many entries may be promised. Reads no format.

A *piece* is a box, chunk, element, page, block or tag. Each is read once, and each costs about a microsecond here and as much in
FFmpeg, which keeps up to a few hundred bytes of memory for it.
"""

from __future__ import annotations

from mm_plugin.errors import MediaError

MOST_PIECES = 1 << 19  # a fragment of MP4 has about four: ten a second for three hours
MOST_TAGS = 4096  # measured: FFmpeg takes 0.1 s for this many, and time grows with the square
# What is made of two numbers of the header, such as the samples of a track times its edits. FFmpeg keeps 24 to 64 bytes for each.
MOST_PRODUCT = 1 << 22


class Budget:
    """What the header of one file has used. Final.

    Attributes:
        pieces: looked at so far.

    Example:
        >>> budget = Budget()
        >>> budget.take(3)
        >>> budget.pieces
        3
    """

    def __init__(self) -> None:
        self.pieces = 0

    def take(self, pieces: int = 1) -> None:
        """Count pieces.

        Raises:
            MediaError: more than `MOST_PIECES`, all together.
        """
        self.pieces += pieces
        if self.pieces > MOST_PIECES:
            raise refuse("pieces")

    def hold(self, promised: int, size: int, left: int, what: str) -> None:
        """Compare what a header promises with what the file can hold.

        Args:
            promised: entries.
            size: of the smallest entry, bytes.
            left: of the file, bytes.
            what: the entries, for messages.

        Raises:
            MediaError: the entries would not fit.
        """
        if promised * size > left:
            raise MediaError(
                f"the file's header promises {promised} {what}, more than its {left} remaining bytes can hold",
                reason="head",
            )


def refuse(what: str) -> MediaError:
    """The error of a header that promises too much."""
    return MediaError(f"the file's header promises more {what} than any video or audio has", reason="head")
