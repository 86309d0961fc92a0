"""What a caller says of a whole request: checked, and brought into the order of its media."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from mm_plugin.errors import PlaceholderError, RequestError, UsageError
from mm_plugin.foreign import shown
from mm_plugin.items import Modality
from mm_plugin.media.with_options import WithOptions
from mm_plugin.prompt.chat import ChatArguments
from mm_plugin.prompt.messages import copied, is_messages

HashScope = Literal["fingerprinted", "raw"]
Overflow = Literal["error", "drop_oldest", "drop_newest", "trim_text"]
# Where media inputs are decoded and prepared: before the output is returned, or where it is encoded.
Prepare = Literal["here", "worker"]


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller says of a whole request, beside prompt, media and options; see `ModelProcessor.process`.

    Raises:
        UsageError: something is of no such kind, or cannot go together.
    """

    mm_hashes: Any = None
    mm_hash_scope: HashScope = "fingerprinted"
    salt: str | bytes | None = None
    max_prompt_tokens: int | None = None
    on_overflow: Overflow = "error"
    expanded: bool = False
    prepare: Prepare = "here"
    deadline: float | None = None
    tools: Any = None
    documents: Any = None
    chat_template: str | None = None
    continue_final_message: bool | None = None

    def chat(self, prompt: Any) -> ChatArguments:
        """What a chat template reads beside the messages of a prompt.

        Raises:
            RequestError: tools or documents are not lists of objects, hold text that cannot be encoded, or are nested too deeply.
            UsageError: they come with a prompt that is not messages.
        """
        given = {name: getattr(self, name) for name in ChatArguments.__struct_fields__}
        named = next((name for name, value in given.items() if value is not None), None)
        if named is not None and not is_messages(prompt):
            raise UsageError(f"{named}: only a prompt of chat messages can have it", argument=named)
        for name in ("tools", "documents"):
            if given[name] is not None:
                given[name] = _objects(given[name], name)
        return ChatArguments(**given)

    def __post_init__(self) -> None:
        if self.salt is not None and not isinstance(self.salt, str | bytes):
            raise UsageError(f"salt must be text or bytes, not {type(self.salt).__name__}", argument="salt")
        wrong = type(self.max_prompt_tokens) is not int or self.max_prompt_tokens < 0
        if self.max_prompt_tokens is not None and wrong:
            raise UsageError(
                f"max_prompt_tokens must be a whole number from 0 on, not {shown(self.max_prompt_tokens)}",
                argument="max_prompt_tokens",
            )
        if type(self.expanded) is not bool:
            raise UsageError(f"expanded must be True or False, not {type(self.expanded).__name__}", argument="expanded")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise UsageError(
                f"chat_template must be the name of a template, not {type(self.chat_template).__name__}",
                argument="chat_template",
            )
        if not isinstance(self.continue_final_message, bool | None):
            raise UsageError(
                f"continue_final_message must be True, False or None, not {shown(self.continue_final_message)}",
                argument="continue_final_message",
            )
        for name, kind in (("mm_hash_scope", HashScope), ("on_overflow", Overflow), ("prepare", Prepare)):
            value, known = getattr(self, name), typing.get_args(kind)
            if not isinstance(value, str) or value not in known:
                raise UsageError(f"{name}={shown(value)} is not one of {', '.join(known)}", argument=name)
        if self.deadline is not None and not _is_time(self.deadline):
            raise UsageError(
                f"deadline must be seconds of time.monotonic(), not {shown(self.deadline):.40}", argument="deadline"
            )
        if self.mm_hash_scope == "raw" and self.salt is not None:
            raise UsageError(
                "mm_hash_scope='raw' takes a caller's hash as it is, so a salt could not keep tenants apart",
                argument="salt",
            )
        if self.expanded and self.on_overflow != "error":
            raise UsageError("expanded ids cannot be shortened: use on_overflow='error'", argument="on_overflow")


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond those of floats
        return False


def _objects(value: Any, name: str) -> list[Any]:
    """A copy of a list of objects that a client sent."""
    if not is_list(value):
        raise RequestError(f"{name}: expected a list of objects, got {type(value).__name__}", path=name)
    for index, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            path = f"{name}[{index}]"
            raise RequestError(f"{path}: expected an object, got {type(entry).__name__}", path=path)
    return [copied(entry, f"{name}[{index}]") for index, entry in enumerate(value)]


def is_list(value: Any) -> bool:
    """Whether it is a sequence, and neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def in_order(modality: Modality, parts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Media from message parts, those that only mark a place filled from the argument in order."""
    if not is_list(given):
        raise UsageError(
            f"{modality.argument} must be a list of media, not {type(given).__name__}", argument=modality.argument
        )
    if not parts:
        return list(given)
    rest = iter(given)
    unfilled = sum(map(_is_open, parts))
    if unfilled != len(given):
        kind = modality.name.lower()
        raise PlaceholderError(
            f"the messages leave {unfilled} {kind} places open, {len(given)} {modality.argument} were given; "
            f"a part of type {kind} has its content under {kind}, url, path or base64, or else its place is for one of "
            f"{modality.argument}",
            path=modality.argument,
            expected=unfilled,
            found=len(given),
        )
    return [_filled(part, next(rest)) if _is_open(part) else part for part in parts]


def _is_open(part: Any) -> bool:
    """Whether a message part only holds a place."""
    return part is None or (isinstance(part, WithOptions) and part.value is None)


def _filled(part: Any, value: Any) -> Any:
    return value if part is None else part.filled(value)
