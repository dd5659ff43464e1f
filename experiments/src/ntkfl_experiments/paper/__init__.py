"""The paper's figures, tables and statements, each worked out by one command."""

from ntkfl_experiments.paper import (
    claims,
    figure8,
    figure9,
    heterogeneity,
    learning,
    lemma1,
    lemma2,
    lemma3,
    lemma4,
    private,
    theorem1,
    theorem2,
)
from ntkfl_experiments.paper.item import Item

_ROOMS = (
    learning, heterogeneity, private, figure8, figure9, theorem1, theorem2, lemma1, lemma2, lemma3, lemma4,
    claims,
)  # fmt: skip
_ORDER = (
    "fig3", "fig4a", "fig4b", "fig4c", "fig5", "fig6", "table1", "fig7", "fig8", "fig9", "theorem1", "theorem2",
    "lemma1", "lemma2", "lemma3", "lemma4", "claims",
)  # fmt: skip
_FOUND = {item.name: item for room in _ROOMS for item in room.ITEMS}
ITEMS: dict[str, Item] = {name: _FOUND[name] for name in _ORDER}

__all__ = ["ITEMS"]
