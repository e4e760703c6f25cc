"""`python -m jobs.status RUN`: how far a run is, and what came of it so far."""

from __future__ import annotations

import sys

from minfer.run import control

if __name__ == "__main__":
    sys.exit(control.main(control.status))
