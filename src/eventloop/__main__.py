"""`python -m eventloop` is `eventloop`."""

from __future__ import annotations

import sys

from eventloop.cli import main

if __name__ == "__main__":
    sys.exit(main())
