"""`ntkfl reproduce` and `ntkfl bench`."""
