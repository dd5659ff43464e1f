"""Stages that hide: subsampling, projection, sparsification, sealing, shuffling."""
