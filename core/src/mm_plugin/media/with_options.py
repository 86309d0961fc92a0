"""`WithOptions`: a media input with options of its own, as a server passes it or as it stands in a chat message."""

from __future__ import annotations

from typing import Any, final


@final
class WithOptions:
    """A media input with options of its own; they come before those of the request.

    It stands wherever a media input may stand: in `images`, `videos` and `audios` of `process`, and in `prepare_item`. A part of a
    chat message that has options becomes one too. Names and values are those that such a part may have: the options of the
    plugin that a request may give, and the names that the model's own utilities use for them. None counts as absent.

    Args:
        value: the media input, in any accepted form.
        **options: its options.

    Attributes:
        value: the media input, in any accepted form.
        options: its options, by name.
        path: where it stands in chat messages, such as `messages[0].content[1]`; None for one that a server passes.
        format: the format that the client declares for encoded audio, or None.

    Example:
        >>> thumbnail = WithOptions("page.png", max_pixels=50_176)
        >>> thumbnail.value, thumbnail.options
        ('page.png', {'max_pixels': 50176})
    """

    __slots__ = ("format", "options", "path", "value")

    def __init__(self, value: Any, /, **options: Any) -> None:
        self.value = value
        self.options: dict[str, Any] = options
        self.path: str | None = None
        self.format: str | None = None

    @classmethod
    def of_part(cls, value: Any, options: dict[str, Any], path: str, format: str | None = None) -> WithOptions:
        """That of a part of a chat message."""
        made = cls(value, **options)
        made.path, made.format = path, format
        return made

    def filled(self, value: Any) -> WithOptions:
        """The same with the media input for which a part holds the place; its own options come first."""
        own: dict[str, Any] = {}
        if isinstance(value, WithOptions):
            value, own = value.value, value.options
        return self.of_part(value, {**self.options, **own}, self.path or "", self.format)
