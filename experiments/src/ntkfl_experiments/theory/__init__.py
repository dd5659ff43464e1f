"""The paper's analysis as pure functions: kernels of the two-layer network, and each bound with its assumptions."""
