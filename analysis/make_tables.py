"""The README's table of ops and the pages behind it, from parquet: `python analysis/make_tables.py`."""

import sys

from minfer.analysis.makers.tables import main

if __name__ == "__main__":
    sys.exit(main())
