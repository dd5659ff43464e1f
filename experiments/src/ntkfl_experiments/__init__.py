"""The paper's figures and theory, and benchmarks: what measures `ntkfl` and is not needed to use it."""
