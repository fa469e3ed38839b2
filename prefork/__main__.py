"""`python -m prefork` is `prefork-serve`."""

import sys

from prefork.cli import main

if __name__ == "__main__":
    sys.exit(main())
