"""Who runs the stages: this process (`simulation`)."""

from ntkfl.engine.simulation import Run, train

__all__ = ["Run", "train"]
