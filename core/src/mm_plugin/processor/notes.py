"""`NotedFields`: how an author says, in `layout`, what is served otherwise than asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from mm_plugin.items import are_notes, join_notes


@final
class NotedFields(Mapping[str, Any]):
    """Model fields with notes on them: what `layout` returns where it has something to say about a media input.

    It is a mapping of the fields alone, so that a note is never taken for a field. Only the fields enter the identity.

    Args:
        fields: the model fields; notes that they have already are kept.
        notes: what is served otherwise than asked or expected, one sentence each, without the place in the request: what was
            asked, what is served, and why.

    Attributes:
        notes: all of them, each once.

    Raises:
        TypeError: a note is not a text, or is empty.

    Example:
        >>> from mm_plugin import NotedFields
        >>> fields = NotedFields({"rows": 4}, ["expected at most 2 rows (max_rows), 4 are served: the image is too thin"])
        >>> dict(fields), len(fields.notes)
        ({'rows': 4}, 1)
    """

    def __init__(self, fields: Mapping[str, Any], notes: Sequence[str]) -> None:
        if not are_notes(notes):
            raise TypeError(f"notes must be a list or tuple of texts that are not empty, got {notes!r}")
        self._fields = dict(fields)
        self.notes: tuple[str, ...] = join_notes(fields.notes if isinstance(fields, NotedFields) else (), notes)

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"NotedFields({self._fields!r}, {self.notes!r})"
