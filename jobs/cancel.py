"""`python -m jobs.cancel RUN`, another name of `minfer cancel RUN`: end the jobs of a run."""

from __future__ import annotations

import sys

from minfer.cli import act

if __name__ == "__main__":
    sys.exit(act("cancel", sys.argv[1:]))
