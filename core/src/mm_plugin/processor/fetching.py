"""URLs of a request replaced by the bytes that they lead to, within its deadline. Everything else is left to whoever opens it."""

from __future__ import annotations

import msgspec

from mm_plugin.errors import MediaError
from mm_plugin.media.limits import Arrived
from mm_plugin.media.sources import is_remote
from mm_plugin.processor.deadline import Deadline
from mm_plugin.processor.request import ReadItem
from mm_plugin.settings import Settings


def fetch_item(item: ReadItem, settings: Settings, arrived: Arrived, deadline: Deadline) -> ReadItem:
    """The item with its bytes, fetched in the calling thread.

    Args:
        item: a media input as it came.
        settings: limits.
        arrived: called with the length of each piece.
        deadline: of the request.

    Raises:
        MediaError, LimitError: as `media.http.fetch`.
        DeadlineError: the deadline passed before all of it came.
    """
    if not is_remote(item.value):
        return item
    from mm_plugin.media.http import fetch

    with deadline.running(f"fetching {item.path}"):
        try:
            data = fetch(item.value, item.path, deadline.for_fetch(settings), arrived)
        except MediaError:
            deadline.check()  # it ended because there was no more time
            raise
    return msgspec.structs.replace(item, value=data, is_fetched=True)


async def fetch_async(item: ReadItem, settings: Settings, arrived: Arrived, deadline: Deadline) -> ReadItem:
    """As `fetch_item`, on the running event loop, for an item that is a URL."""
    from mm_plugin.media import http

    with deadline.running(f"fetching {item.path}"):
        try:
            data = await http.fetch_async(item.value, item.path, deadline.for_fetch(settings), arrived)
        except MediaError:
            deadline.check()
            raise
    return msgspec.structs.replace(item, value=data, is_fetched=True)
