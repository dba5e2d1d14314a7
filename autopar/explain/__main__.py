"""`python -m autopar.explain`."""

import gc
import sys

from autopar.explain import main

if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 1_000)  # collections over all of torch would be a tenth of planning
    sys.exit(main())
