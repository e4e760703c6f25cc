"""How requests are grouped into batches."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minfer.batching.traces import Request
from minfer.ops.axes import offsets

NAMES = ("none", "sorted", "bucketed", "packed")


@dataclass(frozen=True)
class Batch:
    """Requests that run together.

    packed: their tokens lie one after the other, (slots, ...); else each has a row of `width` tokens, (requests, width, ...).
    width: of a row, at least as long as the longest request. slots: tokens that the batch has room for, padding included."""

    requests: tuple[Request, ...]
    packed: bool
    width: int
    slots: int

    @property
    def lengths(self) -> list[int]:
        return [request.length for request in self.requests]

    @property
    def cu_seqlens(self) -> list[int]:
        """The sums of the lengths so far, from 0."""
        return offsets(self.lengths)

    @property
    def tokens(self) -> int:
        """Those that are not padding."""
        return sum(self.lengths)

    @property
    def padded_share(self) -> float:
        """The part of `slots` that is padding, from 0 to 1."""
        return 1 - self.tokens / self.slots


@dataclass(frozen=True)
class Policy:
    """A way to group requests, by name:

        none      as they arrive, in rows as long as the longest of the batch: no grouping
        sorted    the same, sorted by length, shortest first; by arrival among equals
        bucketed  only those of one bucket of lengths together, in rows: as they arrive within it. Batches are in the order in
                  which their first requests arrived
        packed    without padding, one sequence after the other: each request, as they arrive, goes into the first batch with
                  room for it (first-fit; Johnson, Near-optimal bin packing algorithms, 1973)

    capacity: the tokens that a batch has room for, padding included. most: the requests that it has at most.
    block: rows, and the tokens of packed batches, are padded to its multiples, such as a kernel's tile.
    buckets: the longest length of each bucket but the last, increasing; powers of two where it is empty.

    Raises ValueError for values that do not fit."""

    name: str
    capacity: int = 8192
    most: int = 64
    block: int = 1
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"there is no policy {self.name!r}; choose one of {', '.join(NAMES)}")
        for what in ("capacity", "most", "block"):
            value = getattr(self, what)
            if type(value) is not int or value < 1:
                raise ValueError(f"a policy takes an int of at least 1 as its {what}, got {value!r}")
        bounds = tuple(self.buckets) if isinstance(self.buckets, Iterable) else (None,)
        if any(type(bound) is not int for bound in bounds) or any(map(operator.ge, (0, *bounds), bounds)):
            raise ValueError(f"a policy takes buckets that increase from 1, got {self.buckets!r}")
        object.__setattr__(self, "buckets", bounds)  # a tuple, which can be hashed

    def batches(self, requests: Iterable[Request]) -> list[Batch]:
        """Every request in one batch. Raises ValueError for a request that does not fit a batch of its own."""
        requests = list(requests)
        for request in requests:
            self.check(request)
        if self.name == "packed":
            return [self._packed(group) for group in self._first_fit(requests)]
        if self.name == "sorted":
            requests.sort(key=lambda request: request.length)  # which keeps the order of equals
        if self.name != "bucketed":
            return self._rows(requests)
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(self.bucket(request.length), []).append(request)
        batches = [batch for group in groups.values() for batch in self._rows(group)]
        return sorted(batches, key=lambda batch: (batch.requests[0].arrival, batch.requests[0].number))

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that does not fit a batch of its own."""
        if self.padded(request.length) > self.capacity:
            what = f"{request.length} tokens" + (f", {self.padded(request.length)} padded" if self.block > 1 else "")
            raise ValueError(
                f"request {request.number} has {what}, and a batch has room for {self.capacity}; raise capacity or leave it out"
            )

    def padded(self, tokens: int) -> int:
        """The next multiple of `block`."""
        return -(-tokens // self.block) * self.block

    def bucket(self, length: int) -> int:
        """The number of a length's bucket, from 0."""
        return bisect.bisect_left(self.buckets, length) if self.buckets else (length - 1).bit_length()

    def _rows(self, requests: Sequence[Request]) -> list[Batch]:
        """Batches of rows, each with as many requests, in their order, as it has room for."""
        found: list[Batch] = []
        group: list[Request] = []
        width = 0
        for request in requests:
            wider = max(width, self.padded(request.length))
            if group and (len(group) == self.most or (len(group) + 1) * wider > self.capacity):
                found.append(Batch(tuple(group), False, width, len(group) * width))
                group, wider = [], self.padded(request.length)
            group.append(request)
            width = wider
        if group:
            found.append(Batch(tuple(group), False, width, len(group) * width))
        return found

    def _packed(self, group: Sequence[Request]) -> Batch:
        longest = max(request.length for request in group)
        return Batch(tuple(group), True, longest, self.padded(sum(request.length for request in group)))

    def _first_fit(self, requests: Sequence[Request]) -> list[list[Request]]:
        """The requests of each batch. A tournament tree over what is left of each batch finds the first with room in
        log(batches): the node i has the largest of its children 2 i and 2 i + 1."""
        room = self.capacity // self.block * self.block
        leaves = 1 << max(0, len(requests) - 1).bit_length()
        left = [room] * (2 * leaves)
        groups: list[list[Request]] = [[] for _ in requests]
        for request in requests:
            node = 1
            while node < leaves:
                node = 2 * node if left[2 * node] >= request.length else 2 * node + 1
            group = groups[node - leaves]
            group.append(request)
            left[node] = -1 if len(group) == self.most else left[node] - request.length
            while node > 1:
                node //= 2
                left[node] = max(left[2 * node], left[2 * node + 1])
        return [group for group in groups if group]
