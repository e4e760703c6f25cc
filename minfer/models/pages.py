"""The pages of a cache: which are free, and which hold a prefix that another request may share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Pages:
    """`count` pages of `page` tokens. For each page, `users` counts the sequences that use it. A full page can have a key, made
    of its tokens and all tokens before them, by which another request finds it. A page without users keeps its key until the
    page is needed for something else; the least recently used page is taken first. With `share=False` no page gets a key."""

    def __init__(self, count: int, page: int, share: bool = True) -> None:
        self.count, self.page, self.share = count, page, share
        self.unknown = list(range(count - 1, -1, -1))  # free, with nothing of use in them
        self.idle: OrderedDict[int, None] = OrderedDict()  # free, with a key, least recently used first
        self.users = [0] * count
        self.keys: dict[int, bytes] = {}
        self.found: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self.unknown) + len(self.idle)

    def take(self) -> int:
        """A page for one user. Raises IndexError where none is free."""
        if self.unknown:
            number = self.unknown.pop()
        elif self.idle:
            number, _ = self.idle.popitem(last=False)
            del self.found[self.keys.pop(number)]
        else:
            raise IndexError("no page is free")
        self.users[number] = 1
        return number

    def release(self, numbers: Sequence[int]) -> None:
        """Give back a sequence's pages. Of those that keep their key, the page at the end of the text will be taken first."""
        for number in reversed(numbers):
            self.users[number] -= 1
            if self.users[number] == 0 and number in self.keys:
                self.idle[number] = None
            elif self.users[number] == 0:
                self.unknown.append(number)

    def keys_of(self, tokens: Sequence[int], before: Sequence[bytes] = ()) -> list[bytes]:
        """The keys of the full pages of a text. `before`: those of its first pages, if they are known."""
        keys = list(before)
        for start in range(len(keys) * self.page, len(tokens) - self.page + 1, self.page):
            text = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + self.page])
            keys.append(hashlib.blake2b((keys[-1] if keys else b"") + text, digest_size=16).digest())
        return keys

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages that hold the longest known prefix of a text with these keys. Each gets one more user."""
        numbers = []
        for key in keys:
            if key not in self.found:
                break
            number = self.found[key]
            self.idle.pop(number, None)
            self.users[number] += 1
            numbers.append(number)
        return numbers

    def keep(self, number: int, key: bytes) -> None:
        """Give a full page its key, unless another page with the same text has it already."""
        if self.share and key not in self.found and number not in self.keys:
            self.keys[number], self.found[key] = key, number
