"""`python -m fitune`: the same as the `fitune` command."""

import sys

from fitune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
