"""How a viewer turns the frames of a video: by the track's matrix, or by what the stream says from a frame on."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


class Turn(NamedTuple):
    """How a viewer turns a frame: sides are exchanged first, then rows or columns are read backwards."""

    exchanged: bool = False
    upwards: bool = False
    leftwards: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after turning."""
        return (width, height) if self.exchanged else (height, width)

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """A view of an image, turned."""
        turned = pixels.swapaxes(0, 1) if self.exchanged else pixels
        return turned[:: -1 if self.upwards else 1, :: -1 if self.leftwards else 1]


_QUARTERS = (Turn(), Turn(True, True, False), Turn(False, True, True), Turn(True, False, True))  # counterclockwise


class Turns(msgspec.Struct, frozen=True, eq=False):
    """The turn of every frame.

    Attributes:
        first: of the frames before the first change.
        changes: of the frames from a place on, by ascending places.
    """

    first: Turn = Turn()
    changes: tuple[tuple[int, Turn], ...] = ()

    def at(self, place: int) -> Turn:
        """The turn of one frame."""
        found = bisect.bisect_right([start for start, _ in self.changes], place)
        return self.changes[found - 1][1] if found else self.first


def flipped_and_rotated(mirrored: bool, upside_down: bool, turned: float) -> Turn:
    """A frame that is flipped and then rotated.

    Args:
        mirrored: left and right are exchanged first.
        upside_down: top and bottom are exchanged first.
        turned: rotation afterwards, counterclockwise, in whole turns.
    """
    quarter = _QUARTERS[round(turned * 4) % 4]
    rows, columns = (mirrored, upside_down) if quarter.exchanged else (upside_down, mirrored)
    return Turn(quarter.exchanged, quarter.upwards != rows, quarter.leftwards != columns)


def turn_of(frame: VideoFrame) -> Turn:
    """From the matrix that displays a pixel (x, y) of the frame at (a x + c y, b x + d y), x to the right and y down."""
    from av.sidedata.sidedata import SideDataContainer

    try:
        # Not `frame.side_data`: frame and container would refer to one another, and stay until garbage is collected.
        side_data: Any = SideDataContainer(frame)  # type: ignore[call-arg]
        matrix = bytes(side_data["DISPLAYMATRIX"])
    except KeyError:
        return Turn()
    except ValueError:  # the frame has side data of a kind that PyAV has no name for
        return _QUARTERS[round(frame.rotation / 90) % 4]
    a, b, _, c, d = np.frombuffer(matrix, dtype=np.int32, count=5).tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Turn(True, b < 0, c < 0)
    return Turn(False, d < 0, a < 0)
