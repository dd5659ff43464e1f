"""What a table says of the settings behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def test_settings_of_methods_that_share_an_option_are_shown_beside_one_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is an option that a class of the user's own brings, though it was not given: no page has its default."""
    own = "from ntkfl.methods import FedAvg\n\n\nclass Own(FedAvg):\n    momentum: float = 0.9\n"
    (tmp_path / "shown_method.py").write_text(own + "    robust: str = 'clip'\n")
    monkeypatch.syspath_prepend(tmp_path)
    methods = [{"name": "sum-ntk-fl", "average": 0.0}, {"name": "fedavg"}]
    methods.append({"name": "shown_method:Own", "local_steps": 5})
    entries = [{"label": str(i), "method": method} for i, method in enumerate(methods)]
    texts = setting_texts(Comparison(name="a", methods=entries), {str(i): m for i, m in enumerate(methods)})
    sums, averaging, mine = (set(texts[label].split(", ")) for label in "012")
    assert {"local_steps 20", "robust mean"} <= averaging
    assert {"local_steps 5", "robust clip", "momentum 0.9"} <= mine
    assert not {text.split()[0] for text in sums} & {"local_steps", "robust", "momentum"}
    assert not any(text.startswith(("momentum", "batch_size")) for text in averaging)  # not its option; alike in both


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
