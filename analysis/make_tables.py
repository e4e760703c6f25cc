"""The README's table of ops and the pages behind it, from parquet: `python analysis/make_tables.py`.

The same as `python analysis/make.py tables`: `makers/tables.py` says what it writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pyarrow as pa

from minfer.analysis import make
from minfer.analysis.makers.tables import COMMAND


def main(arguments: Iterable[str] | None = None) -> int:
    """Returns the exit status: 0 when the tables are those of the results, and every file could be read."""
    return make.main(arguments, "tables", COMMAND, __doc__)


if __name__ == "__main__":
    pa.set_memory_pool(pa.system_memory_pool())  # as in make.py
    sys.exit(main())
