"""`python -m autopar.explain`."""

import sys

from autopar.explain import main

if __name__ == "__main__":
    sys.exit(main())
