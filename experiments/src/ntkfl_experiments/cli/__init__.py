"""`ntkfl reproduce`, `ntkfl bench`, `ntkfl serve load` and `ntkfl flower bench`."""
