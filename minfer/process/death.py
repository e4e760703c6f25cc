"""What is known of a process that ended, or was ended, before it answered."""

from __future__ import annotations


class Died(Exception):
    """The process is gone; `status` is the row's."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
