"""Beginnings of texts that have been read before, with the memory of a slot that read them."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

Tokens = tuple[int, ...]


class Prefixes:
    """At most ``most`` prefixes; where one more comes, the one unused for longest goes.

    A recurrent state cannot be cut: a prefix serves a text that begins with all of it. Its last token has not been read.
    """

    def __init__(self, most: int):
        self._most = most
        self._memories: collections.OrderedDict[Tokens, Any] = collections.OrderedDict()

    def __iter__(self) -> Iterator[Tokens]:
        return iter(self._memories)

    def __len__(self) -> int:
        return len(self._memories)

    @property
    def memories(self) -> list[Any]:
        """Of the prefixes, in their order: the one unused for longest first."""
        return list(self._memories.values())

    def store(self, prefix: Tokens, memory: Any) -> None:
        self._memories[prefix] = memory
        self._memories.move_to_end(prefix)
        while len(self._memories) > self._most:
            self._memories.popitem(last=False)

    def find(self, text: Tokens) -> Any:
        """The memory of the longest prefix that serves a text, None if none does."""
        fitting = (prefix for prefix in self._memories if text[: len(prefix)] == prefix)
        prefix = max(fitting, key=len, default=None)
        if prefix is None:
            return None
        self._memories.move_to_end(prefix)
        return self._memories[prefix]
