"""The paper's figures, tables and statements, each worked out by one command."""

from ntkfl_experiments.paper.claims import CLAIMS
from ntkfl_experiments.paper.figure8 import FIGURE8
from ntkfl_experiments.paper.figure9 import FIGURE9
from ntkfl_experiments.paper.heterogeneity import FIGURE5
from ntkfl_experiments.paper.item import Item
from ntkfl_experiments.paper.learning import FIGURE3, FIGURE4A, FIGURE4B, FIGURE4C, FIGURE7
from ntkfl_experiments.paper.lemma1 import LEMMA1
from ntkfl_experiments.paper.lemma2 import LEMMA2
from ntkfl_experiments.paper.lemma3 import LEMMA3
from ntkfl_experiments.paper.lemma4 import LEMMA4
from ntkfl_experiments.paper.private import FIGURE6, TABLE1
from ntkfl_experiments.paper.theorem1 import THEOREM1
from ntkfl_experiments.paper.theorem2 import THEOREM2

_ORDER = (
    FIGURE3, FIGURE4A, FIGURE4B, FIGURE4C, FIGURE5, FIGURE6, TABLE1, FIGURE7, FIGURE8, FIGURE9, THEOREM1, THEOREM2,
    LEMMA1, LEMMA2, LEMMA3, LEMMA4, CLAIMS,
)  # fmt: skip
ITEMS: dict[str, Item] = {item.name: item for item in _ORDER}
