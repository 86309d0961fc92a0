"""The tree of errors. Knows nothing of media, models or plugins; holds what went wrong, on what, and whose fault it was.

    MMPluginError
    ├── UsageError            the server's fault: an argument, a setting or a checkpoint that it chose
    ├── RequestError          the client's media or prompt; the message is safe to show (HTTP 4xx)
    │   ├── MediaError        an image, video or audio input that cannot be used
    │   ├── PlaceholderError  the prompt's placeholders and the media do not match
    │   ├── LimitError        a value above a limit
    │   └── DeadlineError     the request was not done in time (HTTP 504)
    ├── PluginError           a plugin's fault; names plugin, distribution and version
    │   ├── PluginLoadError   it could not be found, imported or registered
    │   ├── ProcessorError    its processor failed
    │   └── EncoderError      its encoder failed
    ├── NoModelError          no plugin serves the model; carries every plugin's record
    └── UnattributedError     raised by low layers, which do not know whose value it was; the layers above attribute it
        ├── SpanError         spans, offsets, slots or row counts that do not match
        ├── SizeError         a height, width or grid that no rule accepts
        └── SpecError         a declaration that contradicts itself

Every class has a `code` and the named attributes listed in `attributes`; an attribute that is not given is None.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from mm_plugin.foreign import quietly


class MMPluginError(Exception):
    """The root: every exception that this package raises deliberately is one of its subclasses.

    Args:
        message: the path, what was expected, what was found, and the fix; never the data itself.
        **attributes: the class's named attributes. An unknown name raises `TypeError`.

    Examples:
        >>> error = MediaError("images[2]: the file is empty", path="images[2]", reason="empty")
        >>> error.code, error.path, error.reason
        ('media', 'images[2]', 'empty')
    """

    code: ClassVar[str] = "error"
    attributes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **attributes: Any) -> None:
        unknown = set(attributes) - set(self.attributes)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no attribute {', '.join(sorted(unknown))}")
        super().__init__(message)
        self.message = message
        for name in self.attributes:
            setattr(self, name, attributes.get(name))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders; Exception's own rule would drop the keyword attributes.
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def is_readable(error: MMPluginError) -> bool:
    """Whether an error says what it should: one of a plugin's own class may have no message, or a text that cannot be read."""
    if type(error).__module__ == __name__:
        return True
    message = quietly(lambda: error.message, None)
    return type(message) is str and quietly(lambda: type(str(error)) is str, False)


def _rebuild(cls: type[MMPluginError], message: str, attributes: dict[str, Any]) -> MMPluginError:
    # Without `__init__`, whose arguments a plugin's subclass may have changed.
    error = cls.__new__(cls, message)
    error.__dict__.update(attributes)
    return error


class UsageError(MMPluginError):
    """The server is at fault: an argument, a setting or a checkpoint that it chose."""

    code = "usage"
    attributes: ClassVar[tuple[str, ...]] = ("argument",)
    argument: str | None


class RequestError(MMPluginError):
    """The client's media or prompt is at fault. The message is safe to show; answer with HTTP 4xx."""

    code = "request"
    attributes: ClassVar[tuple[str, ...]] = ("path",)
    path: str | None


class MediaError(RequestError):
    """A media input cannot be used. `path` names it, such as `images[2]`; `reason` is one word for the kind of fault."""

    code = "media"
    attributes: ClassVar[tuple[str, ...]] = ("path", "reason")
    reason: str | None


class PlaceholderError(RequestError):
    """The prompt's placeholders and the request's media do not match."""

    code = "placeholder"
    attributes: ClassVar[tuple[str, ...]] = ("path", "expected", "found")
    expected: int | None
    found: int | None


class LimitError(RequestError):
    """A value above a limit. `setting` names the limit, so that an operator can find it."""

    code = "limit"
    attributes: ClassVar[tuple[str, ...]] = ("path", "setting", "limit", "value")
    setting: str | None
    limit: int | None
    value: int | None

    @classmethod
    def exceeded(
        cls,
        what: str,
        *,
        path: str | None,
        setting: str,
        limit: float,
        value: float | None,
        found: str = "",
        fix: str = "",
    ) -> LimitError:
        """The error of a value above its limit: the only place that words it.

        Args:
            what: what is counted, in the plural: "pixels", "frames", "prompt tokens".
            path: where it stands in the request, such as `images[2]`; the whole request where None.
            setting: the setting or argument that holds the limit.
            limit: the most that is accepted.
            value: what was found; None where all that is known is that it is more.
            found: the value in words, such as "9000 x 9000"; the number alone where empty.
            fix: what the client can do, such as "send a smaller image".

        Examples:
            >>> str(LimitError.exceeded("frames", path="videos[0]", setting="max_video_frames", limit=100, value=120))
            'videos[0]: expected at most 100 frames, got 120; raise max_video_frames'
        """
        got = found or ("more" if value is None else _number(value))
        fixes = " or ".join(filter(None, (f"raise {setting}", fix)))
        return cls(
            f"{path or 'request'}: expected at most {_number(limit)} {what}, got {got}; {fixes}",
            path=path,
            setting=setting,
            limit=int(limit),
            value=None if value is None else int(min(value, sys.maxsize)),
        )


class DeadlineError(RequestError):
    """The request was not done by its deadline, and nothing more of it was begun. `running` is what was under way then."""

    code = "deadline"
    attributes: ClassVar[tuple[str, ...]] = ("path", "running")
    running: tuple[str, ...] | None


def _number(value: float) -> str:
    """A whole number in full, any other with at most three decimals."""
    return str(value) if isinstance(value, int) else f"{value:.3f}".rstrip("0").rstrip(".")


class PluginError(MMPluginError):
    """A plugin is at fault: `plugin`, `distribution` and `version` name it."""

    code = "plugin"
    attributes: ClassVar[tuple[str, ...]] = ("plugin", "distribution", "version")
    plugin: str | None
    distribution: str | None
    version: str | None


class PluginLoadError(PluginError):
    """The plugin could not be found, imported or registered. `record` is its `PluginRecord`."""

    code = "plugin_load"
    attributes: ClassVar[tuple[str, ...]] = ("plugin", "distribution", "version", "record")
    record: Any


class ProcessorError(PluginError):
    """The plugin's processor raised an exception or returned an invalid value."""

    code = "processor"


class EncoderError(PluginError):
    """The plugin's encoder raised an exception or returned embeddings that do not match its items."""

    code = "encoder"


class NoModelError(MMPluginError):
    """No plugin serves the model, or several claim it. `records` holds every plugin's record, `served` the names served."""

    code = "no_model"
    attributes: ClassVar[tuple[str, ...]] = ("asked", "records", "served")
    asked: tuple[str, ...] | None
    records: tuple[Any, ...] | None
    served: tuple[str, ...] | None


class UnattributedError(MMPluginError):
    """Raised by layers that do not know who supplied the value; `processor` and `embed` turn it into an error that does."""

    code = "unattributed"


class SpanError(UnattributedError):
    """Spans, offsets, slots or row counts that do not match."""

    code = "span"


class SizeError(UnattributedError):
    """A height, width or grid, in pixels or patches, that no rule accepts."""

    code = "size"


class SpecError(UnattributedError):
    """A plugin's declaration contradicts itself."""

    code = "spec"
