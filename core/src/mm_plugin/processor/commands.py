"""What a flow asks of whoever drives it: heavy work, away from an event loop, alone or over all items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mm_plugin.processor.budget import Intake
from mm_plugin.processor.request import ReadItem


class Call(msgspec.Struct, frozen=True, eq=False):
    """Call `function`; the flow goes on with what it returns.

    Attributes:
        function: takes nothing.
        doing: what this is, for the error of a deadline; empty for what gives something back, which no deadline stops.
    """

    function: Callable[[], Any]
    doing: str = ""


class Each(msgspec.Struct, frozen=True, eq=False):
    """Call `function` on every item, at the same time where there are several; the flow goes on with a list in their order.

    A URL is replaced by the bytes that it leads to before the function gets the item, and each item is worked on as its bytes have
    come. The first error in order is raised: what comes after an item that failed is not begun, or not fetched to its end.

    Attributes:
        function: takes one item.
        items: the media inputs as they came.
        intake: counts what is fetched.
        doing: what this is, for the error of a deadline.
    """

    function: Callable[[ReadItem], Any]
    items: Sequence[ReadItem]
    intake: Intake
    doing: str
