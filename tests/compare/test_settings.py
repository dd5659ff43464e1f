"""What a table says of the settings behind it."""

from __future__ import annotations

from typing import Any

from ntkfl.compare.settings import described, setting_texts
from ntkfl.compare.spec import Comparison


def test_settings_in_which_methods_differ_are_shown_of_each() -> None:
    """Averaging is on by default in some methods and off in others: nobody should have to know."""

    def texts(*methods: dict[str, Any]) -> list[str]:
        entries = [{"label": str(i), "method": method} for i, method in enumerate(methods)]
        comparison = Comparison(name="a", methods=entries)
        return list(setting_texts(comparison, {str(i): method for i, method in enumerate(methods)}).values())

    sums, averaging = texts({"name": "sum-ntk-fl"}, {"name": "fedavg", "lr": 0.1})
    assert "average 0.9" in sums.split(", ")
    assert {"average 0", "lr 0.1"} <= set(averaging.split(", "))
    assert "lr" not in sums  # it means something else there
    assert texts({"name": "fedavg"}, {"name": "fedavg", "average": 0.0}) == ["defaults", "average 0"]
    assert texts({"name": "fedavg"}, {"name": "fedavg", "local_steps": 50}) == ["local_steps 20", "local_steps 50"]


def test_a_table_says_what_it_is_of() -> None:
    given = {"name": "a", "methods": [{"label": "a", "method": "fedavg"}], "clients_per_round": 5}
    data = {"dataset": "digits", "clients": 20, "alpha": 0.3}
    several = Comparison(**given, data=data, seeds=[3, 5], model={"hidden": [30, 20]})
    assert described(several) == (
        "digits, 20 clients (Dirichlet α = 0.3), 5 per round, 2 seeds, model mlp, hidden 30, 20. "
        "± is the sample standard deviation over seeds 3, 5."
    )
    assert described(Comparison(**given, data=data | {"partition": "iid"}, model={"name": "cnn"})) == (
        "digits, 20 clients (iid), 5 per round, seed 0, model cnn."
    )
