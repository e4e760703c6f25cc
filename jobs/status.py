"""`python -m jobs.status RUN`, another name of `minfer status RUN`: how far a run is, and what came of it so far."""

from __future__ import annotations

import sys

from minfer.cli import act

if __name__ == "__main__":
    sys.exit(act("status", sys.argv[1:]))
