"""Whom a round draws from."""

from __future__ import annotations

from collections import Counter

from ntkfl.deployment.shuffler_transport import drawn_from
from ntkfl.federation.server import Server
from ntkfl.federation.server_state import draw_cohort
from ntkfl.methods import METHODS

NAMES = ["a", "b", "c", "d", "e"]


class Transport:
    """Says how many clients a draw is from; two of them have lapsed."""

    def available(self, wanted: int) -> range:
        return range(len(drawn_from(NAMES, ["a", "b"], [], wanted)))


def cohorts(method: str, options: dict[str, float], rounds: int = 2000) -> Counter[int]:
    """How often each client of a deployment's pool is drawn, two a round."""
    server = Server.__new__(Server)
    server.method, server.transport = METHODS[method](**options), Transport()  # type: ignore[assignment]
    server.task = type("Task", (), {"total_clients": 5})()  # type: ignore[assignment]
    server.deployed, server.seed, server.clients_per_round = True, 0, 2
    return Counter(client for round in range(rounds) for client in server._cohort(round, 0))


def test_a_draw_that_epsilon_counts_on_is_from_all_clients_whoever_is_there() -> None:
    """2 of 5: a chance of 0.4 for each. A draw from the three that are there would give 0.67."""
    plain = cohorts("fedavg", {})
    assert len(plain) == 3
    assert all(abs(count / 2000 - 2 / 3) < 0.06 for count in plain.values())  # six standard deviations
    for method, options in (("fedavg", {"clip": 1.0, "noise": 1.0}), ("private-sums", {"sampling_rate": 0.4})):
        fair = cohorts(method, options)
        assert len(fair) == 5
        assert all(abs(count / 2000 - 0.4) < 0.066 for count in fair.values())


def test_which_guarantees_count_on_draws() -> None:
    counted = {
        ("fedavg", False): {}, ("fedavg", True): {"clip": 1.0, "noise": 1.0},
        ("private-sums", False): {"epsilon": 3.0}, ("private-sums", True): {"sampling_rate": 0.1},
        ("ntk-fl", False): {}, ("private-ridge", False): {},
    }  # fmt: skip
    for (name, counts), options in counted.items():
        assert METHODS[name](**options).counts_on_draws is counts, name
    assert draw_cohort(0, 5, 2, 1) == draw_cohort(0, 5, 2, 1)
