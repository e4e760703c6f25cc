"""The error for a process that ended, or was killed, before it answered."""

from __future__ import annotations


class Died(Exception):
    """The process has ended; `status` goes into the row."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
