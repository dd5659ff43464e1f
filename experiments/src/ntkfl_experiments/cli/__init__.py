"""`ntkfl reproduce`, `ntkfl bench` and `ntkfl flower bench`."""
