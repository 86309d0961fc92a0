"""The inputs of a session's turns, one after another. Knows no field by name: each says in its annotation how it goes on."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from mm_plugin.arrays import as_ids
from mm_plugin.errors import UsageError
from mm_plugin.inputs.processed import MultimodalInputs, NextTurn
from mm_plugin.items import MultimodalDataItem, Offset
from mm_plugin.positions import extend_positions


def merge(before: MultimodalInputs, after: MultimodalInputs, *, generated: Any = ()) -> MultimodalInputs:
    """The inputs of a session in which `after` follows `before` and what was generated in between.

    Offsets of `after` are shifted, and its positions go on from the largest over all axes. Items of `before` are shared, those of
    `after` are copies that share features. A GPU worker goes on with the result: `media.next_turn(merge(media.inputs, turn))`.

    Args:
        before: the session so far; not changed.
        after: the new turn alone; not changed.
        generated: the ids that were generated in between, model ids.

    Raises:
        UsageError: an argument is of another kind.

    Example:
        >>> import numpy as np
        >>> from mm_plugin import MultimodalInputs
        >>> from mm_plugin.scheduler import merge
        >>> def turn(*ids):
        ...     array = np.array(ids)
        ...     return MultimodalInputs(mm_items=[], input_ids=array, padded_input_ids=array, token_modalities=array * 0)
        >>> merge(turn(1, 2), turn(7), generated=[5]).input_ids.tolist()
        [1, 2, 5, 7]
    """
    for name, inputs in (("before", before), ("after", after)):
        if not isinstance(inputs, MultimodalInputs):
            raise UsageError(f"{name}: expected MultimodalInputs, got {type(inputs).__name__}", argument=name)
    turn = _Turn(before, after, as_ids(generated, what="generated"))
    kind = type(before)
    return kind(**{name: _MERGED[rule](turn, name) for name, rule in turn_rules(kind).items()})


@functools.cache
def turn_rules(kind: type[MultimodalInputs]) -> Mapping[str, NextTurn]:
    """The rule by which each field goes on, as its annotation says.

    Raises:
        TypeError: a field names no rule.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    rules: dict[str, NextTurn] = {}
    for name in kind.__struct_fields__:
        named = [extra for extra in getattr(hints[name], "__metadata__", ()) if isinstance(extra, NextTurn)]
        if len(named) != 1:
            raise TypeError(
                f"{kind.__name__}.{name}: expected one NextTurn rule in its annotation, got {len(named)}; "
                "say how the field goes on when a session's next turn follows: Annotated[..., NextTurn.SUM]"
            )
        rules[name] = named[0]
    return rules


class _Turn(msgspec.Struct, frozen=True, eq=False):
    """Two turns and the ids that were generated in between."""

    before: MultimodalInputs
    after: MultimodalInputs
    generated: np.ndarray

    @property
    def shift(self) -> int:
        """Tokens before the later turn."""
        return len(self.before.padded_input_ids) + len(self.generated)

    def both(self, name: str) -> tuple[Any, Any]:
        return getattr(self.before, name), getattr(self.after, name)


def _items(turn: _Turn, name: str) -> list[MultimodalDataItem]:
    before, after = turn.both(name)
    moved = []
    for item in after:
        offsets: list[Offset] = [(start + turn.shift, end + turn.shift) for start, end in item.offsets]
        moved.append(msgspec.structs.replace(item, offsets=offsets))
    return [*before, *moved]


def _joined(turn: _Turn, name: str, between: np.ndarray) -> np.ndarray:
    before, after = turn.both(name)
    return np.concatenate([before, between, after])


def _positions(turn: _Turn, _name: str) -> np.ndarray | None:
    if turn.before.mrope_positions is None and turn.after.mrope_positions is None:
        return None
    (left, delta), (right, _) = _table(turn.before), _table(turn.after)
    return np.concatenate([extend_positions(left, delta, turn.shift), right + turn.shift + delta], axis=1)


def _delta(turn: _Turn, _name: str) -> int | None:
    if turn.before.mrope_positions is None and turn.after.mrope_positions is None:
        return None
    # The later turn begins at position `shift + delta`. What follows it stands `later` further than its index says in the turn.
    (_, delta), (_, later) = _table(turn.before), _table(turn.after)
    return delta + later


def _table(inputs: MultimodalInputs) -> tuple[np.ndarray, int]:
    """A turn's positions and delta; those of a turn without any, as one of text alone may be, are its indices."""
    if inputs.mrope_positions is None:
        seq = len(inputs.padded_input_ids)
        return np.broadcast_to(np.arange(seq, dtype=np.int64), (3, seq)), 0
    return inputs.mrope_positions, inputs.mrope_position_delta or 0


_MERGED: Mapping[NextTurn, Callable[[_Turn, str], Any]] = MappingProxyType(
    {
        NextTurn.ITEMS: _items,
        NextTurn.IDS: lambda turn, name: _joined(turn, name, turn.generated),
        NextTurn.MODALITIES: lambda turn, name: _joined(turn, name, np.zeros_like(turn.generated)),
        NextTurn.POSITIONS: _positions,
        NextTurn.DELTA: _delta,
        NextTurn.SUM: lambda turn, name: sum(turn.both(name)),
        NextTurn.LATEST: lambda turn, name: getattr(turn.after, name),
    }
)

turn_rules(MultimodalInputs)  # a field without a rule is an error at import, not a value that a session loses
