"""Imported last by the process that ranks are forked from (worlds.py): no collector of a rank looks through what is
there by then, nor copies its pages."""

import gc

gc.collect()
gc.freeze()
