"""Where the requests of an engine are that have no slot: waiting for one, paused, or behind a prompt that is yet to be read."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from replayssm_jax.decoding.requests import Request, State


class Queues:
    """Every request is in one place at most; taking one out costs the same however many there are."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._paused: dict[int, Request] = {}
        self._order: list[tuple[int, int]] = []  # a heap; what has left in between is skipped

    def __bool__(self) -> bool:
        """Whether any waits for a slot."""
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Waiting and paused ones."""
        yield from self._waiting.values()
        yield from self._paused.values()

    def wait(self, request: Request) -> Request:
        """Queues a request, by its priority and then by its number."""
        request.state = State.WAITING
        self._waiting[request.number] = request
        heapq.heappush(self._order, _rank(request))
        return request

    def first(self) -> Request:
        """Who gets the next slot; it stays in the queue."""
        while self._order[0][1] not in self._waiting:
            heapq.heappop(self._order)
        return self._waiting[self._order[0][1]]

    def pause(self, request: Request) -> None:
        request.state = State.PAUSED
        self._paused[request.number] = request

    def follow(self, leader: Request, fork: Request) -> None:
        """Lets a fork wait until the leader's prompt has been read."""
        fork.leader = leader
        leader.followers.append(fork)

    def release(self, leader: Request, memory: Any = None) -> None:
        """Queues a leader's forks: with what has been read of its prompt, or to read it themselves."""
        followers, leader.followers = leader.followers, []
        for fork in followers:
            fork.leader, fork.memory = None, memory
            self.wait(fork)

    def remove(self, request: Request) -> None:
        """Takes a request out of wherever it is, if anywhere."""
        self._waiting.pop(request.number, None)
        self._paused.pop(request.number, None)
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader = None
        if len(self._order) > 2 * len(self._waiting) + 64:
            self._order = [_rank(waiting) for waiting in self._waiting.values()]
            heapq.heapify(self._order)


def _rank(request: Request) -> tuple[int, int]:
    return -request.priority, request.number
