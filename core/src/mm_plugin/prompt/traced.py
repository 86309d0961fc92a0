"""Text that remembers, character by character, who wrote it: the chat template or a client.

A template renders with `TracedText` in place of every string. It compares, hashes and formats like the text that it is, so a
template cannot see the difference; what is cut, joined or replaced keeps its origin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Self, SupportsIndex

# One byte for each character. LOST: a plain string, made by an operation without origins. END: the mark after an
# answer that is continued.
CLIENT, OWN, LOST, END = b"\0", b"\1", b"\2", b"\3"

_FIELD = re.compile(r"%(?:\((?P<name>[^)]*)\))?(?P<width>[-+ #0]*\d*(?:\.\d+)?)(?P<kind>[a-zA-Z%])")

# Nothing that a template builds may be longer, characters; a rendering sets its own limit.
TEXT_LIMIT: ContextVar[int] = ContextVar("TEXT_LIMIT", default=1 << 26)


class TextTooLong(Exception):
    """A template built a longer text than it may."""


class TracedText(str):
    r"""Text with the origin of each character. What `str` returns as plain text, because it is not listed here, is LOST.

    Args:
        text: the text.
        origins: a byte for each character: `CLIENT`, `OWN` or `LOST`.

    Example:
        >>> from mm_plugin.prompt.traced import CLIENT, OWN, TracedText
        >>> text = TracedText.of("<|", OWN) + TracedText.of("user", CLIENT) + TracedText.of("|>", OWN)
        >>> text, text[1:4].origins
        ('<|user|>', b'\x01\x00\x00')
    """

    __slots__ = ("_origins",)
    _origins: bytes

    def __new__(cls, text: str = "", origins: bytes | None = None) -> Self:
        made = str.__new__(cls, text)
        if origins is None:
            origins = text.origins if isinstance(text, TracedText) else LOST * len(text)
        made._origins = origins  # noqa: SLF001 - of the object that this makes
        return made

    @classmethod
    def of(cls, text: str, origin: bytes) -> TracedText:
        """Text of one origin."""
        return cls(text, origin * len(text))

    @property
    def origins(self) -> bytes:
        """A byte for each character."""
        return self._origins

    @property
    def plain(self) -> str:
        """The text as an ordinary string."""
        return str.__str__(self)

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> Any:
        return TracedText, (self.plain, self._origins)

    # ---------------------------------------------------------------- parts

    def __getitem__(self, index: SupportsIndex | slice) -> TracedText:
        part = str.__getitem__(self, index)
        return TracedText(
            part, self._origins[index] if isinstance(index, slice) else self._origins[index : _after(index)]
        )

    def __iter__(self) -> Iterator[TracedText]:
        for index in range(len(self)):
            yield self[index : index + 1]

    def _part(self, start: int, length: int) -> TracedText:
        return self[start : start + length]

    def strip(self, chars: str | None = None, /) -> TracedText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> TracedText:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> TracedText:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> TracedText:
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> TracedText:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TracedText]:  # type: ignore[override]
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[TracedText]:  # type: ignore[override]
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def _located(self, parts: Sequence[str], sep: str | None) -> list[TracedText]:
        """Parts in their order, separated by `sep`, or by whitespace where None."""
        found, at = [], 0
        for part in parts:
            if sep is None:
                at = self.find(part, at)  # it begins with what is not whitespace, so it is not found before its place
            found.append(self._part(at, len(part)))
            at += len(part) + len(sep or "")
        return found

    def splitlines(self, keepends: bool = False) -> list[TracedText]:  # type: ignore[override]
        found, at = [], 0
        for line, whole in zip(str.splitlines(self), str.splitlines(self, keepends=True), strict=True):
            found.append(self._part(at, len(whole if keepends else line)))
            at += len(whole)
        return found

    def partition(self, sep: str, /) -> tuple[TracedText, TracedText, TracedText]:
        return self._three(*map(len, str.partition(self, sep)))

    def rpartition(self, sep: str, /) -> tuple[TracedText, TracedText, TracedText]:
        return self._three(*map(len, str.rpartition(self, sep)))

    def _three(self, first: int, middle: int, last: int) -> tuple[TracedText, TracedText, TracedText]:
        return self[:first], self[first : first + middle], self[first + middle : first + middle + last]

    # ---------------------------------------------------------------- together

    def __add__(self, other: Any, /) -> TracedText:
        if isinstance(other, str):
            return join_traced((self, other))
        if hasattr(other, "__radd__"):
            return NotImplemented
        return TracedText(str.__add__(self, other))  # raises its own error

    def __radd__(self, other: str, /) -> TracedText:
        return join_traced((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: Any, /) -> TracedText:
        if not isinstance(times, int):
            return NotImplemented
        check_length(len(self) * max(0, times))
        return TracedText(str.__mul__(self, times), self._origins * times)

    __rmul__ = __mul__

    def join(self, parts: Iterable[str], /) -> TracedText:
        listed = list(parts)
        if not all(isinstance(part, str) for part in listed):
            str.join(self, listed)  # raises its own error
        pieces = [piece for part in listed for piece in (self, part)][1:]
        return join_traced(pieces)

    def replace(self, old: Any, new: Any, count: SupportsIndex = -1, /) -> TracedText:
        if not isinstance(old, str) or not isinstance(new, str):
            return TracedText(str.replace(self, old, new, count))  # raises its own error
        places = [match.start() for match in re.finditer(re.escape(old), self)]
        places = places if int(count) < 0 else places[: int(count)]
        check_length(len(self) + len(places) * (len(new) - len(old)))
        pieces: list[str] = []
        at = 0
        for place in places:
            pieces += (self[at:place], new)
            at = place + len(old)
        return join_traced((*pieces, self[at:]))

    def ljust(self, width: SupportsIndex, fillchar: str = " ", /) -> TracedText:
        return self._between(0, width, fillchar)

    def rjust(self, width: SupportsIndex, fillchar: str = " ", /) -> TracedText:
        return self._between(max(0, int(width) - len(self)), width, fillchar)

    def center(self, width: SupportsIndex, fillchar: str = " ", /) -> TracedText:
        missing = max(0, int(width) - len(self))
        return self._between(missing // 2 + (missing & int(width) & 1), width, fillchar)

    def _between(self, before: int, width: SupportsIndex, fill: str) -> TracedText:
        after = max(0, int(width) - len(self) - before)
        filling = TracedText(fill)
        return join_traced((filling * before, self, filling * after))

    def __mod__(self, values: Any, /) -> TracedText:
        pieces: list[str] = []
        at, number, single = 0, 0, not isinstance(values, tuple)
        expected = str.__mod__(self.plain, values) if _short_fields(self) else None  # raises its own error
        for match in _FIELD.finditer(self.plain):
            pieces.append(self[at : match.start()])
            at = match.end()
            if match["kind"] == "%":
                pieces.append(self[at - 1 : at])
                continue
            name = match["name"]
            value = values[name] if name is not None else values if single else values[number]
            number += 1
            pieces.append(_field(match, not match["width"], value))
        found = join_traced((*pieces, self[at:]))
        return found if found.plain == expected else TracedText(str.__mod__(self.plain, values))

    # ---------------------------------------------------------------- case

    def upper(self) -> TracedText:
        return self._mapped(str.upper)

    def lower(self) -> TracedText:
        return self._mapped(str.lower)

    def casefold(self) -> TracedText:
        return self._mapped(str.casefold)

    def title(self) -> TracedText:
        return self._mapped(str.title)

    def capitalize(self) -> TracedText:
        return self._mapped(str.capitalize)

    def swapcase(self) -> TracedText:
        return self._mapped(str.swapcase)

    def _mapped(self, change: Callable[[str], str]) -> TracedText:
        """Changed character by character; as the least trusted of them where their number changes."""
        changed = change(self.plain)
        if len(changed) == len(self):
            return TracedText(changed, self._origins)
        return TracedText.of(changed, min(self._origins[i : i + 1] for i in range(len(self))))


class SafeText(TracedText):
    """What Jinja's filter `safe` makes: other text that is added to it is escaped for HTML, also where nothing else is."""

    __slots__ = ()

    def __new__(cls, text: Any = "", origins: bytes | None = None) -> Self:
        written = as_written(text)
        made = str.__new__(cls, written)
        made._origins = written.origins if origins is None else origins  # noqa: SLF001 - of the object that this makes
        return made

    def __html__(self) -> SafeText:
        return self

    def __getitem__(self, index: SupportsIndex | slice) -> SafeText:
        return SafeText(super().__getitem__(index))

    def __add__(self, other: str, /) -> SafeText:
        return SafeText(join_traced((self, escaped(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str, /) -> SafeText:
        return SafeText(join_traced((escaped(other), self))) if isinstance(other, str) else NotImplemented

    def replace(self, old: Any, new: Any, count: SupportsIndex = -1, /) -> SafeText:
        return SafeText(super().replace(old, escaped(new), count))

    def join(self, parts: Iterable[str], /) -> SafeText:
        return SafeText(super().join([escaped(part) for part in parts]))

    def _mapped(self, change: Callable[[str], str]) -> SafeText:
        return SafeText(super()._mapped(change))


class ClientInt(int):
    """A whole number that a client sent: its digits are a client's text."""

    def __str__(self) -> str:
        return TracedText.of(int.__repr__(self), CLIENT)


class ClientFloat(float):
    """A number that a client sent: its digits are a client's text."""

    def __str__(self) -> str:
        return TracedText.of(float.__repr__(self), CLIENT)


def check_length(length: int) -> None:
    """Refuse a text that is longer than a template may build."""
    if length > TEXT_LIMIT.get():
        raise TextTooLong(f"the chat template builds a text of {length} characters")


def join_traced(parts: Iterable[str]) -> TracedText:
    """Texts one after another; a plain string among them is LOST."""
    listed = [part if isinstance(part, TracedText) else TracedText(part) for part in parts]
    check_length(sum(map(len, listed)))
    return TracedText("".join(listed), b"".join([part.origins for part in listed]))


def _short_fields(layout: TracedText) -> bool:
    """Refuse fields of a `%` layout that are wider than a text may be."""
    for match in _FIELD.finditer(layout.plain):
        for number in re.findall(r"\d+", match["width"]):
            check_length(int(number[:19]))
    return True


def _field(match: re.Match[str], bare: bool, value: Any) -> TracedText:
    """What a field of a `%` layout writes."""
    if bare and match["kind"] == "s":
        return as_written(value)
    own = value.origins == OWN * len(value) if isinstance(value, TracedText) else type(value) in (int, float)
    return TracedText.of(f"%{match['width']}{match['kind']}" % (value,), OWN if own else CLIENT)


def as_written(value: Any) -> TracedText:
    """What a template writes of a value: a number of the template's own is its own text, any other value a client's.

    Args:
        value: anything that stands between `{{` and `}}`.
    """
    if isinstance(value, TracedText):
        return value
    if isinstance(value, str):
        return TracedText(value)
    written = str(value)
    if isinstance(written, TracedText):
        return written
    own = value is None or isinstance(value, int | float)
    return TracedText.of(written, OWN if own else CLIENT)


def as_clients(value: Any) -> Any:
    """A copy of plain data in which all text and numbers are a client's.

    Args:
        value: what JSON can hold.
    """
    if isinstance(value, TracedText):
        return value
    if isinstance(value, str):
        return TracedText.of(value, CLIENT)
    if isinstance(value, Mapping):
        return {as_clients(name): as_clients(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_clients(part) for part in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return ClientInt(value)
    if isinstance(value, float):
        return ClientFloat(value)
    return TracedText.of(f"<{type(value).__name__}>", CLIENT)  # as in transformers: nothing that a template could call


def escaped(value: Any) -> SafeText:
    """Text escaped for HTML, as Jinja's filter `escape` does it."""
    if isinstance(value, SafeText):
        return value
    text = as_written(value)
    for character, name in (("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ('"', "&#34;")):
        text = text.replace(character, TracedText.of(name, CLIENT))
    return SafeText(text)


def own_spans(origins: bytes) -> list[tuple[int, int]]:
    """The longest half-open intervals that the template wrote, in order."""
    return [match.span() for match in re.finditer(b"\x01+", origins)]


def _after(index: SupportsIndex) -> int | None:
    number = index.__index__()
    return None if number == -1 else number + 1
