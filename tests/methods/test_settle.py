"""Which settings go with which method: refused in one place, in one line that says why."""

from __future__ import annotations

from typing import Any

import pytest

from ntkfl.errors import ConfigError
from ntkfl.federation.config import build_method
from ntkfl.methods import Privacy, Robust
from ntkfl.methods.base import kinds_of, settle
from tests.methods.known import METHODS

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("ntk-fl", {"secure_sum": True}, {}, "ntk-fl needs each client's reply, and secure_sum"),
    ("scaffold", {"secure_sum": True}, {}, "scaffold needs each client's reply, and secure_sum"),
    ("fedavg", {"sparsity": 0.9}, {}, "sparsity is for methods that send rows, and fedavg sends updates"),
    ("sum-ntk-fl", {"values": "8bit"}, {}, "values is for methods that send rows, and sum-ntk-fl sends sums"),
    ("fedavg", {"epsilon": 1.0}, {}, "fedavg adds none: take private-sums or private-ridge"),
    ("sum-ntk-fl", {"noise_clients": 3}, {}, "noise_clients is for methods that add noise"),
    ("sum-ntk-fl", {}, {"updates": "clip"}, "robust updates bounds updates, and sum-ntk-fl sends sums"),
    ("fedavg", {}, {"trim_losses": 0.1}, "robust trim_losses bounds rows, and fedavg sends updates"),
    ("fedavg", {"secure_sum": True}, {"updates": "clip"}, "compares clients, of whom a secure sum shows none"),
    ("private-sums", {}, {"updates": "clip"}, "robust updates bounds updates, and private-sums sends sums"),
]


@pytest.mark.parametrize(("name", "privacy", "robust", "why"), REFUSED)
def test_a_combination_that_makes_no_sense_is_refused(
    name: str, privacy: dict[str, Any], robust: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        settle(METHODS[name](), Privacy(**privacy), Robust(**robust))
    assert "\n" not in str(refused.value)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="shows no rows that could be shuffled"):
        Privacy(secure_sum=True, shuffle=True)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("secure", [False, True])
def test_every_method_can_be_deployed_with_all_bounds_there_are(name: str, secure: bool) -> None:
    method = METHODS[name]()
    if secure and not all(reply.additive for reply in method.replies.values()):
        return
    privacy, robust = settle(method, Privacy(**({"secure_sum": True, "shuffle": False} if secure else {})), "on")
    assert settle(method, privacy, robust) == (privacy, robust)  # nothing that it turns on is refused
    bounded = robust != Robust()
    assert bounded == ("rows" in kinds_of(method) or ("update" in kinds_of(method) and not secure))


def test_what_is_given_wins_over_the_methods_own_setting_by_setting() -> None:
    method = METHODS["cp-ntk-fl"]()
    own, _ = settle(method)
    given, _ = settle(method, Privacy(projected_dim=50, shuffle=False))
    assert (own.projected_dim, own.shuffle) == (200, True)
    assert (given.projected_dim, given.shuffle, given.sparsity) == (50, False, own.sparsity)
    assert settle(METHODS["fedavg"]()) == (Privacy(), Robust())  # the papers' methods hide and bound nothing


def test_an_option_that_moved_is_looked_for_in_its_section() -> None:
    for option, section in {"secure_sum": "privacy", "epsilon": "privacy", "row_clip": "robust"}.items():
        with pytest.raises(ConfigError, match=rf"{option} is a setting of \[{section}\], not an option of fedavg"):
            build_method({"name": "fedavg", option: 1})
