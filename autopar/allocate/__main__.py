"""`python -m autopar.allocate`."""

import sys

from autopar.allocate import main

if __name__ == "__main__":
    sys.exit(main())
