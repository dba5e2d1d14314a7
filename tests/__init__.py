"""Imported before everything else: collections over all of torch would be a twentieth of the suite."""

import gc

gc.set_threshold(100_000, 50, 1_000)
