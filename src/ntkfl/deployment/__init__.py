"""A federation across machines: its contract, its aggregator and its clients."""
