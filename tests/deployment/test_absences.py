"""Whom a round draws from, and what is said of those that do not answer."""

from __future__ import annotations

from collections import Counter

import pytest

from ntkfl.deployment.absences import Absences, drawn_from
from ntkfl.federation.server import Server
from ntkfl.federation.server_state import draw_cohort
from ntkfl.methods import METHODS

NAMES = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("lapsed", "dropped", "wanted", "names"),
    [
        ([], [], 3, NAMES),
        (["b"], [], 3, ["a", "c", "d", "e"]),
        (["b"], ["c"], 3, ["a", "d", "e"]),
        (["b"], ["c"], 4, ["a", "c", "d", "e"]),  # one that is there before one that is not
        (["b"], ["c"], 5, NAMES),
        (NAMES, [], 2, ["a", "b"]),
    ],
)
def test_those_that_are_away_are_drawn_last(
    lapsed: list[str], dropped: list[str], wanted: int, names: list[str]
) -> None:
    assert drawn_from(NAMES, lapsed, dropped, wanted) == names


def test_each_is_said_once_and_again_when_it_is_back() -> None:
    said: list[str] = []
    now = [100.0]
    absences = Absences(said.append, lambda: now[0])
    for lapsed in ([], ["b"], ["b"], ["b", "c"]):
        absences.note(lapsed, len(lapsed), 4)
    assert [line.split()[0] for line in said] == ["b", "c"]
    now[0] += 65
    absences.note(["c"], 1, 9)
    assert said[2:] == ["b is back after 1:05 min; it was missing since round 4"]


def test_where_no_name_is_told_they_are_counted() -> None:
    said: list[str] = []
    now = [100.0]
    absences = Absences(said.append, lambda: now[0])
    for away in (0, 1, 1):
        absences.note([], away, 4)
    now[0] += 5
    absences.note([], 0, 7)
    assert said == [
        "clients that do not answer and have not called since: 1; not waited for until they call",
        "clients that are back after 5 s: 1; they were missing since round 4",
    ]


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
