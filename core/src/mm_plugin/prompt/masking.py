"""Stand-ins for characters that could make a special token of a client's text, so that it stays text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mm_plugin.errors import RequestError

# Characters of a supplementary private-use plane: no tokenizer has them in its vocabulary, and no template looks for them.
_FIRST_STAND_IN = 0xF0000

# A chat template writes it where the model's own code encodes the text before and after it separately. It never reaches the
# ids, and a client cannot send it: text with a character of its plane is refused.
SEGMENT_BREAK = "\U000ffffd"


class Mask:
    """Replaces chosen characters in every string of a message by stand-ins, and puts them back. Final.

    Args:
        choose: gives the indices of the characters of a text to replace.
        whole: gives the indices at which a whole protected token begins.

    Example:
        >>> from mm_plugin.prompt.masking import Mask
        >>> find = lambda text: [index for index, letter in enumerate(text) if letter == "<"]
        >>> mask = Mask(find, find)
        >>> hidden = mask.hide({"role": "user", "content": "a <b>"})
        >>> "<" in hidden["content"], mask.reveal(hidden["content"])
        (False, 'a <b>')
    """

    def __init__(self, choose: Callable[[str], list[int]], whole: Callable[[str], list[int]]) -> None:
        self._choose, self._whole = choose, whole
        self._stand_ins: dict[str, str] = {}
        self._originals: dict[int, str] = {}

    @property
    def used(self) -> bool:
        """Whether any character was replaced."""
        return bool(self._stand_ins)

    def hide(self, value: Any, key: str | None = None) -> Any:
        """A copy of the value with stand-ins in its strings, keys of mappings included."""
        if isinstance(value, Mapping):
            # A template looks names up, so those that it can look up stay, unless they are a protected token themselves.
            return {self._hide_text(name, named=True): self.hide(part, name) for name, part in value.items()}
        if isinstance(value, list):
            return [self.hide(part) for part in value]
        if not isinstance(value, str):
            return value
        return self._hide_text(value, named=key == "type")

    def _hide_text(self, value: str, *, named: bool) -> str:
        if named and value.isidentifier() and not self._whole(value):
            return value
        characters = list(value)
        for index in self._choose(value):
            characters[index] = self._stand_in(characters[index])
        return "".join(characters)

    def _stand_in(self, character: str) -> str:
        if character not in self._stand_ins:
            code = _FIRST_STAND_IN + len(self._stand_ins)
            self._stand_ins[character] = chr(code)
            self._originals[code] = character
        return self._stand_ins[character]

    def reveal(self, text: str) -> str:
        """The text with the original characters in place of the stand-ins."""
        return text.translate(self._originals)


def checked_text(text: str, index: int) -> str:
    """The text of message `index`, which can be encoded and holds no stand-in.

    Raises:
        RequestError: it has a lone surrogate, or a character of private-use plane 15.
    """
    if any(
        _FIRST_STAND_IN <= ord(c) < _FIRST_STAND_IN + 0xFFFE or "\ud800" <= c <= "\udfff" for c in text if c > "\ud7ff"
    ):
        raise RequestError(
            f"messages[{index}]: text must not contain lone surrogates or characters of private-use plane 15; remove them",
            path=f"messages[{index}]",
        )
    return text
