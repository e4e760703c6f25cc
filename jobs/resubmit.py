"""`python -m jobs.resubmit RUN`, another name of `minfer resubmit RUN`: submit what a run lacks, and nothing else."""

from __future__ import annotations

import sys

from minfer.cli import act

if __name__ == "__main__":
    sys.exit(act("resubmit", sys.argv[1:]))
