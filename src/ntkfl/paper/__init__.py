"""The paper's figures, tables and statements, each worked out by one command."""

from ntkfl.paper import attack, claims, heterogeneity, learning, private
from ntkfl.paper.item import Context, Finding, Item, Outcome

_ROOMS = (learning, heterogeneity, private, attack, claims)
_ORDER = ("fig3", "fig4a", "fig4b", "fig4c", "fig5", "fig6", "table1", "fig7", "fig8", "claims")
_FOUND = {item.name: item for room in _ROOMS for item in room.ITEMS}
ITEMS: dict[str, Item] = {name: _FOUND[name] for name in _ORDER}

__all__ = ["ITEMS", "Context", "Finding", "Item", "Outcome"]
