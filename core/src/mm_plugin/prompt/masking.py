"""Client text stays text: stand-ins for special tokens in strings that a client wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from mm_plugin.errors import RequestError

# Supplementary private-use characters: no tokenizer has them in its vocabulary, and no template looks for them.
_FIRST_STAND_IN = 0xF0000


# A chat template writes it where the model's own code tokenizes what comes before and after separately. It never reaches the ids,
# and no client can send it: text with a character of its plane is refused.
SEGMENT_BREAK = "\U000ffffd"


# Composed or not, with or without accents: what a tokenizer's normalizer may make of a character.
NORMAL_FORMS: tuple[Literal["NFKC", "NFKD"], ...] = ("NFKC", "NFKD")


class Mask:
    """Puts stand-ins for chosen characters in every string of a message, and takes them out again."""

    def __init__(self, choose: Callable[[str], list[int]], whole: Callable[[str], list[int]]) -> None:
        self._choose, self._whole = choose, whole
        self._stand_ins: dict[str, str] = {}
        self._originals: dict[int, str] = {}

    @property
    def used(self) -> bool:
        """Whether any character was replaced."""
        return bool(self._stand_ins)

    def hide(self, value: Any, key: str | None = None) -> Any:
        """The value with stand-ins in its strings."""
        if isinstance(value, Mapping):
            # A template looks names up, so those that can be looked up stay, unless they are a token themselves.
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
        """The text with the characters that the stand-ins stand for."""
        return text.translate(self._originals)


def cleaned(text: str, index: int) -> str:
    """Text that can be encoded, and holds none of our stand-ins."""
    if any(
        _FIRST_STAND_IN <= ord(c) < _FIRST_STAND_IN + 0xFFFE or "\ud800" <= c <= "\udfff" for c in text if c > "\ud7ff"
    ):
        raise RequestError(
            f"messages[{index}]: a lone surrogate or a character of private-use plane 15 is not accepted",
            path=f"messages[{index}]",
        )
    return text
