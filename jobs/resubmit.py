"""`python -m jobs.resubmit RUN`: submit what a run lacks, and nothing else."""

from __future__ import annotations

import sys

from minfer.run import control

if __name__ == "__main__":
    sys.exit(control.main(control.resubmit))
