"""`python -m kvkeep`."""

from __future__ import annotations

import sys

from kvkeep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
