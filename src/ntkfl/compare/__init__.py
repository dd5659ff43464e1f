"""Methods on equal terms: the same data, clients and seeds, settings chosen on held-out clients, one table."""
