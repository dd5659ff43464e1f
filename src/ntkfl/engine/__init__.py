"""Who runs the stages: this process (`simulation`)."""

from ntkfl.engine.run import Run
from ntkfl.engine.simulation import train

__all__ = ["Run", "train"]
