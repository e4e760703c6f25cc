"""`python -m jobs.cancel RUN`: end the jobs of a run."""

from __future__ import annotations

import sys

from minfer.run import control

if __name__ == "__main__":
    sys.exit(control.main(control.cancel))
