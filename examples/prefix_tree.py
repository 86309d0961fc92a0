"""A prefix cache over cache ids: a tree whose edges are runs of ids, with a page of KV cache for each run.

Cache ids need nothing of media: the span of each item holds its sentinels, so two prompts share a prefix exactly as far as their
text and their media are the same. What is special about media stands in `usable`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from mm_plugin import MultimodalInputs


class Node:
    """A run of ids, and what follows it."""

    def __init__(self, ids: np.ndarray, parent: Node | None) -> None:
        self.ids, self.parent = ids, parent
        self.children: dict[int, Node] = {}
        self.used = 0


class PrefixTree:
    """Remembers the prompts that were computed, up to a number of tokens; forgets the least recently used first.

    Args:
        capacity: tokens of KV cache.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.size = capacity, 0
        self._root, self._clock = Node(np.zeros(0, np.int64), None), itertools.count(1)

    def match(self, ids: np.ndarray) -> int:
        """How many of the first ids were computed before."""
        return self._walk(ids)[1]

    def insert(self, ids: np.ndarray) -> None:
        """Remember a prompt that was computed; nothing of a request that failed may come here."""
        node, known = self._walk(ids)
        rest = np.array(ids[known:], np.int64)
        if len(rest):
            leaf = Node(rest, node)
            leaf.used = next(self._clock)
            node.children[int(rest[0])] = leaf
            self.size += len(rest)
        self._evict()

    def _walk(self, ids: np.ndarray) -> tuple[Node, int]:
        """The node in which the known prefix ends, split there where it ends within a run; and the prefix's length."""
        node, known, now = self._root, 0, next(self._clock)
        while known < len(ids) and (child := node.children.get(int(ids[known]))) is not None:
            both = min(len(child.ids), len(ids) - known)
            differ = np.flatnonzero(child.ids[:both] != ids[known : known + both])
            shared = int(differ[0]) if len(differ) else both
            if shared < len(child.ids):
                child = self._split(child, shared)
            child.used = now
            node, known = child, known + shared
        return node, known

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in two; returns the first part."""
        assert node.parent is not None
        first = Node(node.ids[:at], node.parent)
        first.used = node.used
        node.parent.children[int(first.ids[0])] = first
        node.ids, node.parent = node.ids[at:], first
        first.children[int(node.ids[0])] = node
        return first

    def _evict(self) -> None:
        while self.size > self.capacity:
            leaf = min(self._leaves(self._root), key=lambda node: node.used)
            assert leaf.parent is not None
            del leaf.parent.children[int(leaf.ids[0])]
            self.size -= len(leaf.ids)

    def _leaves(self, node: Node) -> Iterator[Node]:
        for child in node.children.values():
            yield from self._leaves(child) if child.children else (child,)


def usable(inputs: MultimodalInputs, hit: int) -> int:
    """How much of a hit can be used: the last token of a prompt is computed, and no span is cut that must stay whole."""
    return inputs.clip_chunk(0, min(hit, len(inputs.padded_input_ids) - 1))
