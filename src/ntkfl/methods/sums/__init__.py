"""Methods whose clients send sums over their samples: `sum-ntk-fl`, `sum-ridge`, those of differential privacy."""
