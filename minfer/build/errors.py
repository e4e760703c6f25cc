"""What a failed build says: the compiler's first error, and whether a disk was full."""

from __future__ import annotations

import re

DISK_FULL = re.compile("No space left on device|Disk quota exceeded")


class BuildError(Exception):
    """A kernel that does not compile; the message is the compiler's first error, `log` all that it said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


def first_error(log: str) -> str:
    """The line of a compiler's output that says what is wrong, without the folders in front of the file name."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    patterns = (
        r"^(?!collect2).*(:|\)|ptxas|nvcc|ld).*\b(fatal )?error\b\s*:|^nvcc fatal\s*:",
        r"undefined reference|cannot find|No space left|Killed",
    )
    for pattern in patterns:
        if found := next((line for line in lines if re.search(pattern, line)), None):
            return re.sub(r"(^|\s)/\S*/", r"\1", found)
    return lines[0] if lines else "the compiler failed and said nothing"
