"""What a table says of the settings behind it."""

from __future__ import annotations

from ntkfl.compare.settings import described
from ntkfl.compare.spec import Comparison


def test_a_table_says_what_it_is_of() -> None:
    given = {"name": "a", "methods": [{"label": "a", "method": "fedavg"}], "clients_per_round": 5}
    data = {"dataset": "digits", "clients": 20, "alpha": 0.3}
    several = Comparison(**given, data=data, seeds=[3, 5], model={"hidden": [30, 20]})
    assert described(several) == (
        "digits, 20 clients (Dirichlet α = 0.3, composition), 5 per round, 2 seeds, model mlp, hidden 30, 20. "
        "± is the sample standard deviation over seeds 3, 5."
    )
    assert described(Comparison(**given, data=data | {"partition": "iid"}, model={"name": "cnn"})) == (
        "digits, 20 clients (iid), 5 per round, seed 0, model cnn."
    )
    assert "(Dirichlet α = 0.3, shares)," in described(Comparison(**given, data=data | {"reading": "shares"}))
    assert "(Dirichlet α = 0.3, composition, overlapping)," in described(
        Comparison(**given, data=data | {"overlap": True})
    )
