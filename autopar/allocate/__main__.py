"""`python -m autopar.allocate`."""

import sys

from autopar.allocate import main
from autopar.planning.garbage import collect_seldom

if __name__ == "__main__":
    collect_seldom()
    sys.exit(main())
