"""`python -m minfer`, where the command `minfer` is not installed."""

import sys

from minfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
