"""The tree of errors. Knows nothing of media, models or plugins; holds what went wrong, on what, and whose fault it was.

    MMPluginError
    ├── UsageError            the server called us wrongly
    ├── RequestError          the client's media or prompt; the message is safe to show (HTTP 4xx)
    │   ├── MediaError        an image, video or audio that cannot be used
    │   ├── PlaceholderError  the prompt's placeholders and the media do not fit
    │   └── LimitError        more than a limit allows
    ├── PluginError           a plugin's fault; names plugin, distribution and version
    │   ├── PluginLoadError   it could not be found, imported or registered
    │   ├── ProcessorError    its processor failed
    │   └── EncoderError      its encoder failed
    ├── NoModelError          no plugin serves the model; carries every plugin's record
    └── UnattributedError          raised by low layers, which cannot know whose value it was; the layers above assign blame
        ├── SpanError         spans, offsets, slots or row counts that do not fit
        ├── SizeError         a height, width or grid that no rule can use
        └── SpecError         a declaration that contradicts itself

Every class has a `code`, and the named attributes listed in `attributes`; those not given are None.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar


class MMPluginError(Exception):
    """The root: everything that leaves this package is one of its subclasses.

    Args:
        message: what failed on what, the values that disagree, and the fix; never the data itself.
        **attributes: the class's named attributes. An unknown name is a `TypeError`.
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
        given = {name: getattr(self, name) for name in self.attributes}
        return (_rebuild, (type(self), self.message, given))


def _rebuild(cls: type[MMPluginError], message: str, attributes: dict[str, Any]) -> MMPluginError:
    return cls(message, **attributes)


class UsageError(MMPluginError):
    """The server called us wrongly: an argument, a setting or a checkpoint that it chose."""

    code = "usage"
    attributes: ClassVar[tuple[str, ...]] = ("argument",)
    argument: str | None


class RequestError(MMPluginError):
    """The client's media or prompt is at fault. The message is safe to show; answer with HTTP 4xx."""

    code = "request"
    attributes: ClassVar[tuple[str, ...]] = ("path",)
    path: str | None


class MediaError(RequestError):
    """A media input cannot be used. `path` is such as `images[2]`; `reason` is one word for the kind of fault."""

    code = "media"
    attributes: ClassVar[tuple[str, ...]] = ("path", "reason")
    reason: str | None


class PlaceholderError(RequestError):
    """The prompt's placeholders and the request's media do not fit."""

    code = "placeholder"
    attributes: ClassVar[tuple[str, ...]] = ("path", "expected", "found")
    expected: int | None
    found: int | None


class LimitError(RequestError):
    """More than a limit allows. `setting` names the limit, so that an operator can find it."""

    code = "limit"
    attributes: ClassVar[tuple[str, ...]] = ("path", "setting", "limit", "value")
    setting: str | None
    limit: int | None
    value: int | None

    @classmethod
    def exceeded(cls, what: str, *, path: str | None, setting: str, limit: float, value: float) -> LimitError:
        """The error of a value above a limit.

        Args:
            what: the unit that is counted, such as `tokens`.
            path: where in the request, or None for the whole of it.
            setting: name of the limit.
            limit: the largest value that is accepted.
            value: what was found.

        >>> LimitError.exceeded("frames", path="videos[0]", setting="max_video_frames", limit=8, value=9).message
        'videos[0]: expected at most 8 frames, got 9; the limit is max_video_frames'
        """
        return cls(
            f"{path or 'request'}: expected at most {limit} {what}, got {value}; the limit is {setting}",
            path=path,
            setting=setting,
            limit=int(limit),
            value=int(min(value, sys.maxsize)),
        )


class PluginError(MMPluginError):
    """A plugin's fault. `plugin`, `distribution` and `version` say whose."""

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
    """The plugin's processor raised, or returned what it must not."""

    code = "processor"


class EncoderError(PluginError):
    """The plugin's encoder raised, or returned rows that do not fit its items."""

    code = "encoder"


class NoModelError(MMPluginError):
    """No plugin serves the model, or more than one claims it. `records` holds every plugin's record, `served` what is served."""

    code = "no_model"
    attributes: ClassVar[tuple[str, ...]] = ("asked", "records", "served")
    asked: tuple[str, ...] | None
    records: tuple[Any, ...] | None
    served: tuple[str, ...] | None


class UnattributedError(MMPluginError):
    """Raised by layers that cannot know who supplied the value; `processor` and `embed` turn it into one that says so."""

    code = "neutral"


class SpanError(UnattributedError):
    """Spans, offsets, slots or row counts that do not fit together."""

    code = "span"


class SizeError(UnattributedError):
    """A height, width or grid, in pixels or patches, that no rule can use."""

    code = "size"


class SpecError(UnattributedError):
    """A plugin's declaration contradicts itself."""

    code = "spec"
