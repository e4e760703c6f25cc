"""`python -m minfer`, where the command `minfer` is not installed."""

import sys

from minfer.cli import main

sys.exit(main())
