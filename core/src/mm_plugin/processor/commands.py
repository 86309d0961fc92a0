"""What a flow asks of whoever drives it: heavy work, away from an event loop, alone or over all items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mm_plugin.processor.request import ReadItem


class Call(msgspec.Struct, frozen=True, eq=False):
    """Call `function`; the flow goes on with what it returns."""

    function: Callable[[], Any]


class Each(msgspec.Struct, frozen=True, eq=False):
    """Call `function` on every item, at the same time where there are several; the flow goes on with a list in their order.

    All calls end before the first error in order is raised.
    """

    function: Callable[[Any], Any]
    items: Sequence[Any]


class Fetch(msgspec.Struct, frozen=True, eq=False):
    """Replace URLs by the bytes that they lead to where that can be done without a thread; the flow goes on with the items."""

    items: Sequence[ReadItem]
