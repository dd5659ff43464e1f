"""What a site promises it keeps: against servers that lie about noise, change the terms, or ask once more."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from ntkfl.cli import app
from ntkfl.errors import ConfigError, MessageError, NTKFLError, Refused
from ntkfl.federation.client import Client, from_system
from ntkfl.federation.policy import Agreed, Limits, Policy, Site, Terms, code_digest, running_code
from ntkfl.methods import (
    CPNTKFL,
    NTKFL,
    Centralized,
    FedAvg,
    Method,
    PrivateRidge,
    PrivateSums,
    SumNTKFL,
    Task,
)
from ntkfl.methods.base import privacy_of
from ntkfl.models import mlp
from ntkfl.privacy.ledger import FILE, Ledger
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_noise import GRAINS, integer_change
from ntkfl.wire import Message

ISSUED = """
methods = ["sum-ntk-fl", "private-sums"]
secure_sum = "required"
min_clients = 4
[privacy]
epsilon_per_run = 3.0
epsilon_per_year = 6.0
delta = 1e-6
"""
KEY, OTHER = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
LIMITS = Limits(epsilon_per_run=3.0, epsilon_per_year=6.0, delta=1e-5)
PRIVATE = Policy(methods=("private-sums", "private-ridge"), privacy=LIMITS)


def agreed(method: Method, **privacy: Any) -> Agreed:
    return Agreed(method, privacy_of(method, Privacy(**privacy)))


def terms_of(method: Method, rounds: int = 1, privacy: dict[str, Any] | None = None, **more: Any) -> Terms:
    """The terms of a method with such settings of [privacy] over its own."""
    return Terms.of(*agreed(method, **(privacy or {})), rounds=rounds, outputs=3, inputs=(5,), **more)


def lying(terms: Terms, **privacy: Any) -> Terms:
    """Terms as a server writes them that checks nothing."""
    return terms.model_copy(update={"privacy": terms.privacy | privacy})


def site(folder: Path, policy: Policy | None = PRIVATE, node: str = "1") -> Site:
    return Site(policy, Ledger(folder), node)


class RealClient:
    """A client with data, and a server that asks it about weights of its choice."""

    def __init__(self, method: Method, **privacy: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.task = Task(mlp(5, 4, 3), 3, "ce", privacy=agreed(method, **privacy).privacy)
            data = torch.randn(20, 5), torch.randint(3, (20,))
        self.client = Client(0, self.task, method, lambda: data, from_system)

    def question(self, round: int, scale: float = 1.0) -> bytes:
        return Message("weights", round, {"weights": scale * self.task.like}).encode()

    def reply(self, question: bytes) -> Callable[[], bytes]:
        def make() -> bytes:
            self.client.rest()  # as in a process of its own for each question: new noise
            return self.client.answer(Message.decode(question)).encode()

        return make


def test_the_file_of_the_documentation_and_the_one_that_is_written_are_read(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(ISSUED)
    policy = Policy.read(tmp_path / "policy.toml")
    assert policy.privacy == Limits(epsilon_per_run=3, epsilon_per_year=6, delta=1e-6)
    new = tmp_path / "new.toml"
    assert CliRunner().invoke(app, ["policy", "new", str(new)]).exit_code == 0
    assert Policy.read(new).privacy == Limits(epsilon_per_run=3, epsilon_per_year=6, delta=1e-6)
    again = CliRunner().invoke(app, ["policy", "new", str(new)])
    assert isinstance(again.exception, ConfigError)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("epsilon = 3", "unknown option 'epsilon'"),
        ('shuffler = "abc"', "'shuffler'"),
        ("[privacy]\nepsilon_per_run = 3", "epsilon_per_year"),
        ("= 3", "not valid TOML"),
    ],
)
def test_a_policy_with_a_mistake_is_one_line_that_names_the_file(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f'methods = ["sums"]\n{line}')
    with pytest.raises(ConfigError, match=said) as error:
        Policy.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert "pydantic" not in str(error.value)


# Terms as they travel.


def test_terms_come_back_as_they_were_and_their_digest_covers_every_option() -> None:
    terms = terms_of(PrivateSums(), 20, min_clients=4, shuffler=KEY)
    assert Terms.parse(terms.text) == terms
    assert len(terms.text) < 2_000
    more: dict[str, Any] = {"min_clients": 4, "shuffler": KEY}
    others = [terms_of(PrivateSums(), 20, own, **more) for own in ({}, {"epsilon": 3.1}, {"sum_samples": 999})]
    digests = {one.digest for one in [*others, terms_of(PrivateSums(lr=5.0), 20, **more)]}
    assert len(digests) == 4
    assert terms.digest in digests


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"rounds":1', '"rounds":1,"rounds":1'),
        lambda text: text.replace('"rounds":1', '"rounds":"1"'),
        lambda text: text.replace('"rounds":1', '"rounds":1e999'),
        lambda text: text.replace('"rounds":1', '"rounds":1,"more":2'),
        lambda text: text.replace('"rounds":1', '"rounds": 1'),
        lambda text: text.replace('"rounds":1,', ""),
        lambda text: text + " " * 70_000,
        lambda text: "[" * 100_000,
        lambda text: f"[{text}]",
        lambda text: "",
    ],
)
def test_terms_written_in_another_way_are_refused_in_one_line(change: Callable[[str], str]) -> None:
    with pytest.raises(MessageError) as error:
        Terms.parse(change(terms_of(FedAvg()).text))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@given(st.text(max_size=200) | st.integers(0, 500).map(lambda n: terms_of(FedAvg()).text[:-1][:n]))
def test_whatever_else_comes_is_a_message_error(text: str) -> None:
    with pytest.raises(MessageError):
        Terms.parse(text)


def test_a_server_cannot_write_terms_beyond_what_its_noise_is_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ε of private-ridge is for 1 rounds, and the run has 11"):
        terms_of(PrivateRidge(), 11)
    shared = {"noise_clients": 4, "secure_sum": True}
    with pytest.raises(ConfigError, match="ε counts on 4 clients"):
        terms_of(PrivateSums(), 1, shared, min_clients=3)
    few = terms_of(PrivateSums(), 1, shared, **SECURE).model_copy(update={"min_clients": 3})
    long = terms_of(PrivateRidge()).model_copy(update={"rounds": 11})
    for terms, said in ((few, "ε counts on 4 clients"), (long, "for 1 rounds, and the run has 11")):
        with pytest.raises(ConfigError, match=said):  # nor can one that checks nothing itself
            site(tmp_path, None).admit(terms, "a", terms.shuffler)


@pytest.mark.parametrize(
    ("method", "lie", "said"),
    [
        (FedAvg(), {"epsilon": 3.0}, "fedavg adds none"),  # an ε in the ledger, and no noise
        (SumNTKFL(), {"epsilon": 3.0}, "sum-ntk-fl adds none"),
        (CPNTKFL(), {"secure_sum": True}, "leave"),
        (PrivateSums(), {"epsilon": 1e9}, "so little noise is no privacy"),
        (PrivateSums(), {"epsilon": 0.01, "delta": 1e-300}, "no noise is wide enough"),
        (PrivateSums(), {"epsilon": -1.0}, "'epsilon'"),
        (PrivateSums(), {"epsilon": 10**400}, "'epsilon'"),
        (PrivateSums(), {"budget_rounds": 10**400}, "'budget_rounds'"),
        (PrivateSums(), {"noise_clients": 10**10}, "'noise_clients'"),
        (PrivateSums(), {"noise_by": "server"}, "'noise_by'"),
        (PrivateSums(), {"more": 1}, "'more'"),
    ],
)
def test_settings_that_no_method_has_are_refused_in_one_line(
    tmp_path: Path, method: Method, lie: dict[str, Any], said: str
) -> None:
    terms = Terms.parse(lying(terms_of(method), **lie).text)
    for policy in (None, Policy(methods=(method.name,)), Policy(methods=(method.name,), privacy=LIMITS)):
        with pytest.raises(NTKFLError, match=said) as error:
            site(tmp_path, policy).admit(terms, "a")
        assert "\n" not in str(error.value)


def test_settings_left_to_a_sites_own_defaults_are_refused(tmp_path: Path) -> None:
    whole = terms_of(PrivateSums())
    less = {name: value for name, value in whole.privacy.items() if name != "epsilon"}
    changes: list[dict[str, Any]] = [{"method": {"name": "private-sums"}}, {"privacy": {}}, {"privacy": less}]
    for few in changes:
        with pytest.raises(Refused, match="leave settings of private-sums out"):
            site(tmp_path, None).admit(whole.model_copy(update=few), "a")
    inside = whole.model_copy(update={"method": whole.method | {"epsilon": 3.0}})
    with pytest.raises(ConfigError, match=r"epsilon is a setting of \[privacy\]"):
        site(tmp_path, None).admit(inside, "a")


def test_terms_import_no_code_that_the_app_has_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    options = terms_of(FedAvg()).method
    for named in ({"name": "evil_module:Method"}, {"loss": "evil_module:loss"}, {"loss": "os:system"}):
        terms = terms_of(FedAvg()).model_copy(update={"method": options | named})
        with pytest.raises(Refused, match="import its module in the app"):
            site(tmp_path, None).admit(terms, "a")
    assert "evil_module" not in sys.modules
    allowed = Policy(methods=("evil_module:Method",))
    terms = terms_of(FedAvg()).model_copy(update={"method": options | {"name": "evil_module:Method"}})
    with pytest.raises(SystemError, match="imported"):
        site(tmp_path, allowed).admit(terms, "a")


@pytest.mark.parametrize("run", ["", "1\npolicy: ε = 0.1 at δ = 1e-09", "\x1b[2J", "x" * 65])
def test_the_name_of_a_run_writes_no_lines_of_its_own_into_the_log(tmp_path: Path, run: str) -> None:
    with pytest.raises(Refused, match="printable") as error:
        site(tmp_path).admit(terms_of(PrivateSums(), 20), run)
    assert str(error.value).isprintable()


# What a policy refuses.

SECURE: dict[str, Any] = {"min_clients": 5, "shuffler": KEY}
MASKED = SECURE | {"privacy": {"secure_sum": True}}


@pytest.mark.parametrize(
    ("policy", "method", "more", "said"),
    [
        ({"methods": ("sums",)}, FedAvg(), {}, "fedavg sends updates, and the policy allows sums"),
        ({"methods": ("fedavg", "rows")}, SumNTKFL(), {}, "sum-ntk-fl sends sums"),
        ({"methods": ("sums",), "min_clients": 6}, SumNTKFL(), {"min_clients": 5}, "rounds of 5 clients"),
        ({"methods": ("sums",), "secure_sum": "required"}, SumNTKFL(), {}, "without secure sums"),
        ({"methods": ("rows",), "secure_sum": "required"}, CPNTKFL(), SECURE, "without secure sums"),
        ({"methods": ("rows",)}, Centralized(), {}, "centralized sends samples, and the policy allows rows"),
        ({"methods": ("sums",), "shuffler": OTHER}, SumNTKFL(), MASKED, "the shuffler is sha256:aaa"),
        ({"methods": ("sums",)}, SumNTKFL(), {"privacy": {"secure_sum": True}}, "no shuffler"),
        ({"methods": ("sums",), "privacy": LIMITS}, SumNTKFL(), {}, "without noise of this site's"),
        ({"methods": ("sums",), "code": (KEY,)}, SumNTKFL(), {}, "the code of ntkfl is sha256:"),
    ],
)
def test_each_line_of_a_policy_refuses(
    tmp_path: Path, policy: dict[str, Any], method: Method, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said) as error:
        site(tmp_path, Policy(**policy)).admit(terms_of(method, **more), "a", more.get("shuffler", ""))
    assert "\n" not in str(error.value)
    assert not (tmp_path / FILE).exists() or (tmp_path / FILE).read_bytes() == b""


def test_what_is_named_in_methods_may_leave(tmp_path: Path) -> None:
    """A method without noise below [privacy], and samples themselves, which leave nowhere else."""
    with pytest.raises(Refused, match="centralized sends samples"):  # not as in a simulation either
        site(tmp_path, None).admit(terms_of(Centralized()), "a")
    named: list[tuple[str, Method, Limits | None]] = [
        ("sum-ntk-fl", SumNTKFL(), LIMITS), ("samples", Centralized(), None), ("centralized", Centralized(), None),
    ]  # fmt: skip
    for number, (name, method, limits) in enumerate(named):
        site(tmp_path, Policy(methods=(name,), privacy=limits)).admit(terms_of(method), f"run {number}")


def test_replies_go_through_the_shuffler_of_the_terms_and_no_other(tmp_path: Path) -> None:
    policy, terms = Policy(methods=("sums",), shuffler=KEY), terms_of(SumNTKFL(), **MASKED)
    site(tmp_path, policy).admit(terms, "a", KEY)
    for other in (OTHER, ""):
        with pytest.raises(Refused, match="go through"):
            site(tmp_path, policy).admit(terms, "a", other)


# ε is the site's own.


@pytest.mark.parametrize(
    "lie",
    [
        {"epsilon": 3000.0},  # what five clients once trained under, while the aggregator reported 3
        {"epsilon": 3.01},
        {"epsilon": None},
        {"delta": 0.5},  # 3 is at a δ at which it says nothing
        {"noise_clients": 100},  # noise of others, in replies that the server sees one by one
        {"sampling_rate": 0.01},  # the server draws the cohorts
    ],
)
def test_every_way_to_have_less_noise_is_refused(tmp_path: Path, lie: dict[str, Any]) -> None:
    own = site(tmp_path)
    own.admit(terms_of(PrivateSums(), 20), "honest")
    with pytest.raises(Refused, match="ε"):
        own.admit(terms_of(PrivateSums(), 20, lie), "lie")


def test_a_loss_that_nobody_vouches_for_voids_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that mixes records makes of each record's gradient everybody's: the noise is for one."""
    (tmp_path / "own_loss.py").write_text("def mixing(f, y):\n    return f.sum() * (f * y).sum(-1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_loss")
    terms = terms_of(PrivateSums(loss="own_loss:mixing"), 20)
    with pytest.raises(Refused, match="nobody vouches for 'own_loss:mixing'"):
        site(tmp_path).admit(terms, "a")
    site(tmp_path, Policy(methods=("private-sums", "own_loss:mixing"), privacy=LIMITS)).admit(terms, "a")
    site(tmp_path, Policy(methods=("sums",))).admit(terms, "b")  # no limit, and no ε to keep


def by_accountant(deviations: dict[float, int], delta: float) -> float:
    """ε of repeated Gaussian noise, its width given in units of the change, by Google's library."""
    accounting = pytest.importorskip("dp_accounting", reason="needs the extra audit")
    accountant = accounting.rdp.RdpAccountant()
    for deviation, times in deviations.items():
        accountant.compose(accounting.GaussianDpEvent(deviation), times)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("noise_clients", [1, 4])
def test_the_epsilon_of_a_site_is_what_another_library_makes_of_its_noise(noise_clients: int) -> None:
    """From the deviation σ of the noise that this client adds, as the server sees its reply."""
    method = PrivateSums(input_share=0.0)
    own = agreed(method, noise_clients=noise_clients)
    sigma = method.widths(Task(mlp(5, 4, 3), 3, "ce", privacy=own.privacy), {"gradient": 1})["gradient"]
    change = (GRAINS**2 + (GRAINS // 10) ** 2) ** 0.5
    epsilon = PRIVATE.epsilon(own, 20) or 0.0
    assert epsilon == pytest.approx(by_accountant({sigma / change: 20}, 1e-5), rel=0.02)
    assert (epsilon < 3.001) == (noise_clients == 1)


@pytest.mark.parametrize("rate", [1.0, 0.01])
@pytest.mark.parametrize("whitens", [True, False])
@pytest.mark.parametrize("rounds", [1, 7, 20])
def test_epsilon_covers_whatever_the_network_lets_the_first_round_release(
    rounds: int, whitens: bool, rate: float
) -> None:
    """Without moments of inputs to send, their share of the budget goes to the gradients. A site cannot know which of
    the two it is, so its ε covers both (once, with credit for sampling, it said 1.4 where the run cost 4.4).
    """
    method = PrivateSums(input_share=0.9)
    own = agreed(method, epsilon=1.0, sampling_rate=rate)
    first = () if whitens else (nn.LayerNorm(5),)  # whose own weights change what the layer sees
    task = Task(nn.Sequential(*first, nn.Linear(5, 3)), 3, "ce", privacy=own.privacy)
    task.example = torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64)
    asked = method.asked_once(task, Message("weights", 1, {"asks": torch.tensor(1, dtype=torch.uint8)}))
    assert bool(asked) == whitens
    size = task.like.numel()
    numbers = {"gradient": size, "samples": 1} | asked
    widths = method.widths(task, numbers)
    deviations = {widths["gradient"] / integer_change([size], counted=True): rounds}
    if asked:
        ((name, count),) = asked.items()
        deviations[widths[name] / integer_change([count])] = 1
    spent, real = PRIVATE.epsilon(own, rounds) or 0.0, by_accountant(deviations, 1e-5)
    assert spent > 0.99 * real
    if (rounds, whitens, rate) in ((20, True, 1.0), (20, False, 0.01)):
        assert spent == pytest.approx(real, rel=0.02)


def test_the_epsilon_of_private_ridge_is_that_of_both_its_sums() -> None:
    method = PrivateRidge()
    own = agreed(method)
    widths = method.widths(Task(mlp(5, 4, 3), 3, "ce", privacy=own.privacy), {"gram": 15, "cross": 15})
    change = integer_change([15, 15], False, method.grains, method.rounding)
    (width,) = set(widths.values())
    assert PRIVATE.epsilon(own, 1) == pytest.approx(by_accountant({width / change: 1}, 1e-5), rel=0.02)


def test_noise_of_others_counts_in_secure_sums_as_far_as_the_policy_says(tmp_path: Path) -> None:
    shared = {"noise_clients": 4, "secure_sum": True}
    method = agreed(PrivateSums(), **shared)
    limits = [LIMITS.model_copy(update={"noise_clients": n}) for n in range(1, 6)]
    trusting = [PRIVATE.model_copy(update={"privacy": limit}) for limit in limits]
    found = [policy.epsilon(method, 20) or 0.0 for policy in trusting]
    assert found == sorted(found, reverse=True)
    assert found[3] == found[4] == pytest.approx(3.0)
    # Without masks the server sees this site's reply, whatever the policy relies on elsewhere.
    alone = agreed(PrivateSums(), noise_clients=4)
    assert [policy.epsilon(alone, 20) for policy in trusting] == [found[0]] * 5
    terms = terms_of(PrivateSums(), 20, shared, **SECURE)
    site(tmp_path, trusting[3]).admit(terms, "a", KEY)
    with pytest.raises(Refused, match="ε would be"):
        site(tmp_path / "other", trusting[2]).admit(terms, "a", KEY)


def test_what_is_about_to_be_promised_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        site(tmp_path).admit(terms_of(PrivateSums(), 20, min_clients=4), "77")
    promise = "ε = 3 at δ = 1e-05 for a record of this site; 3 are left this year"
    line = f"policy: run 77 is accepted: private-sums, 20 rounds, sends sums; {promise}"
    assert capsys.readouterr().out.splitlines() == [line]


def test_noise_from_a_seed_is_for_simulations(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="follows from a seed"):
        site(tmp_path).admit(terms_of(PrivateSums(), 20), "a", seeded=True)
    site(tmp_path, None).admit(terms_of(PrivateSums(), 20), "a", seeded=True)


# Questions.


@pytest.mark.parametrize("memory", [False, True])
def test_private_ridge_answers_once_whatever_it_is_asked(tmp_path: Path, memory: bool) -> None:
    """Eleven rounds were answered once, ε being for one. Without a policy too: the run's own terms bind."""
    method, kept = PrivateRidge(penalty=1.0), dict[str, Any]()
    client, answered = RealClient(method), []
    for round, exchange in [(1, 0), *((r, 0) for r in range(2, 12)), *((1, e) for e in range(1, 12))]:
        own = Site.of({}, 1, memory=kept) if memory else site(tmp_path)  # anew, as after every restart
        own.admit(terms_of(method), "a")
        question = client.question(round, 1.0 + exchange)
        try:
            answered.append(own.release("a", round, exchange, question, client.reply(question)))
        except Refused:
            continue
    assert len(answered) == 1


def test_rounds_are_counted_by_the_client_over_restarts_and_failed_rounds(tmp_path: Path) -> None:
    """The server's numbers jump, as after rounds that failed: three answers are three."""
    method, rounds = PrivateSums(), {"budget_rounds": 3}
    client, terms = RealClient(method, **rounds), terms_of(method, 3, rounds)
    for round in (1, 3):
        own = site(tmp_path)
        own.admit(terms, "a")
        own.release("a", round, 0, client.question(round), client.reply(client.question(round)))
    for round in (2, 4):
        with pytest.raises(Refused, match=f"round {round}"):
            own.release("a", round, 0, client.question(round), client.reply(client.question(round)))
    with own.ledger.locked():
        spent = [entry.epsilon for entry in own.ledger.entries if entry.what == "reply"]
    assert spent == [pytest.approx(PRIVATE.epsilon(agreed(method, **rounds), n)) for n in (1, 2)]


def test_a_repeated_question_gets_the_same_bytes_and_an_altered_one_nothing(tmp_path: Path) -> None:
    method, rounds = PrivateSums(), {"budget_rounds": 5}
    client, terms = RealClient(method, **rounds), terms_of(method, 5, rounds)
    question = client.question(1)
    own = site(tmp_path)
    own.admit(terms, "a")
    first = own.release("a", 1, 0, question, client.reply(question))
    assert first != client.reply(question)()  # its noise is new each time it is made
    again = site(tmp_path)
    again.admit(terms, "a")
    assert again.release("a", 1, 0, question, client.reply(question)) == first
    others = [(1, 0, client.question(1, 2.0)), (1, 1, question), (0, 0, question), (-1, 0, question)]
    for round, exchange, other in others:
        with pytest.raises(Refused):
            again.release("a", round, exchange, other, client.reply(other))
    again.release("a", 2, 0, client.question(2), client.reply(client.question(2)))
    with pytest.raises(Refused, match="its reply is gone"):
        again.release("a", 1, 0, question, client.reply(question))
    stranger = site(tmp_path, node="2")
    stranger.admit(terms, "a")
    with pytest.raises(Refused, match="a policy folder"):  # two nodes on one ledger, and not one's reply for the other
        stranger.release("a", 2, 0, client.question(2), client.reply(client.question(2)))
    with own.ledger.locked():
        assert [entry.round for entry in own.ledger.entries] == [0, 1, 2]


def test_without_a_policy_a_repeated_question_is_made_again_and_leaves_only_if_equal() -> None:
    terms, memory = terms_of(FedAvg()), dict[str, Any]()

    def released(reply: bytes) -> bytes:
        own = Site.of({}, memory=memory)
        own.admit(terms, "a")
        return own.release("a", 1, 0, b"question", lambda: reply)

    assert released(b"reply") == released(b"reply") == b"reply"
    with pytest.raises(Refused, match="gone"):
        released(b"other")


def test_a_method_of_two_exchanges_is_asked_twice_and_not_without_end(tmp_path: Path) -> None:
    own = site(tmp_path, Policy(methods=("rows",)))
    own.admit(terms_of(NTKFL(), 2), "a")
    for exchange in range(16):
        own.release("a", 1, exchange, b"question", lambda: b"reply")
    with pytest.raises(Refused, match="no more are"):
        own.release("a", 1, 16, b"question", lambda: b"reply")


def test_terms_that_change_within_a_run_are_refused(tmp_path: Path) -> None:
    own = site(tmp_path)
    own.admit(terms_of(PrivateSums(), 20), "a")
    changes = (
        terms_of(PrivateSums(lr=5.0), 20),
        terms_of(PrivateSums(), 19),
        terms_of(PrivateSums(), 20, {"epsilon": 2.9}),
    )
    for other in changes:
        again = site(tmp_path)
        with pytest.raises(Refused, match="the terms of run a changed"):
            again.admit(other, "a")
        with pytest.raises(Refused, match="not been admitted"):  # and what was refused answers nothing
            again.release("a", 1, 0, b"question", lambda: b"reply")
    with pytest.raises(Refused, match="not been admitted"):
        own.release("b", 1, 0, b"question", lambda: b"reply")


def test_the_year_ends_runs_that_were_admitted_side_by_side(tmp_path: Path) -> None:
    """Three runs of ε = 3 are admitted while nothing is spent, and 6 a year hold all the same."""
    own = site(tmp_path)
    for run in "abc":
        own.admit(terms_of(PrivateSums(), 1, {"budget_rounds": 1}), run)
    for run in "ab":
        own.release(run, 1, 0, b"question", lambda: b"reply")
    with pytest.raises(Refused, match="0 of 6 are left of this year's ε, and the run takes 3"):
        own.release("c", 1, 0, b"question", lambda: b"reply")
    with pytest.raises(Refused, match="left of this year"):
        own.admit(terms_of(PrivateSums(), 20, {"epsilon": 0.5}), "d")


RACE = """
import time
from tests.federation.test_policy import *
folder, name = Path(sys.argv[1]), sys.argv[2]
own = site(folder / "ledger")
own.admit(terms_of(PrivateSums(), 5, {"budget_rounds": 5}), "a")
(folder / name).touch()
def make():
    end = time.monotonic() + 30
    while not ((folder / "one").exists() and (folder / "two").exists()) and time.monotonic() < end:
        time.sleep(0.01)
    return name.encode()
print(own.release("a", 1, 0, b"question", make).decode())
"""


def test_two_processes_asked_the_same_at_once_give_the_same_bytes(tmp_path: Path) -> None:
    """Each waits with its reply until the other is about to make one."""
    both = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path), name], stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    said = [process.communicate(timeout=60)[0].split()[-1] for process in both]
    assert said[0] == said[1]
    ledger = Ledger(tmp_path / "ledger")
    with ledger.locked():
        assert [entry.what for entry in ledger.entries] == ["terms", "reply"]


def test_nothing_leaves_where_the_ledger_cannot_be_written(tmp_path: Path) -> None:
    made = []
    own = site(tmp_path / "ledger")
    own.admit(terms_of(PrivateSums(), 20), "a")
    (tmp_path / "ledger" / FILE).unlink()
    (tmp_path / "ledger" / FILE).mkdir()
    with pytest.raises(Refused, match="nothing was sent"):
        own.release("a", 1, 0, b"question", lambda: made.append(1) or b"reply")  # type: ignore[func-returns-value]
    assert made == []
    (tmp_path / "ledger" / FILE).rmdir()
    (tmp_path / "ledger" / "replies").write_text("no folder")
    with pytest.raises(Refused, match="nothing was sent"):
        own.release("a", 1, 0, b"question", lambda: b"reply")
    with own.ledger.locked():
        assert own.ledger.entries == []


# Where a site's policy is found, and what code runs under it.


def test_the_owner_of_a_site_decides_before_the_app_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("node", "environment", "app"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.toml").write_text(f'methods = ["sums", "{name}:Method"]')
    asked = tmp_path / "app" / "policy.toml"
    assert Site.of({}, policy=asked).policy.methods[1] == "app:Method"
    monkeypatch.setenv("NTKFL_POLICY", str(tmp_path / "environment" / "policy.toml"))
    assert Site.of({}, policy=asked).policy.methods[1] == "environment:Method"
    found = Site.of({"policy": str(tmp_path / "node" / "policy.toml"), "partition-id": 3}, policy=asked)
    assert found.policy.methods[1] == "node:Method"
    assert found.ledger.folder == tmp_path / "node" / "ledger" / "3"
    with pytest.raises(NTKFLError, match="no such file"):
        Site.of({"policy": str(tmp_path / "gone.toml")})


def test_the_digest_of_code_changes_with_the_code_alone(tmp_path: Path) -> None:
    (tmp_path / "one" / "inner").mkdir(parents=True)
    (tmp_path / "one" / "a.py").write_text("x = 1")
    (tmp_path / "one" / "inner" / "b.py").write_text("y = 1")
    before = code_digest(tmp_path / "one")
    (tmp_path / "one" / "notes.txt").write_text("text")
    assert code_digest(tmp_path / "one") == before
    (tmp_path / "one" / "inner" / "b.py").write_text("y = 2")
    assert code_digest(tmp_path / "one") != before


def test_code_that_the_policy_lists_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(methods=("updates",), code=tuple(running_code().values()))
    assert set(running_code()) >= {"ntkfl", "tests"}  # the package, and what uses it
    site(tmp_path, policy).admit(terms_of(FedAvg()), "a")
    without = policy.model_copy(update={"code": (running_code()["ntkfl"],)})
    with pytest.raises(Refused, match="`code` does not list"):
        site(tmp_path, without).admit(terms_of(FedAvg()), "b")
    (tmp_path / "came_later.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("came_later")  # in a process that has answered before
    with pytest.raises(Refused, match="the code of came_later is sha256:"):
        site(tmp_path, policy).admit(terms_of(FedAvg()), "a")
    del sys.modules["came_later"]


def test_what_is_shown_to_a_data_protection_officer(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(ISSUED.replace('"required"', '"optional"').replace("1e-6", "1e-5"))
    own = Site.of({"policy": str(tmp_path / "policy.toml")})
    once: dict[str, Any] = {"budget_rounds": 1}
    for run, method, privacy in (("4711" * 8, PrivateSums(), once), ("4712", SumNTKFL(), {})):
        own.admit(terms_of(method, 1, privacy, min_clients=4), run)
        own.release(run, 1, 0, b"question", lambda: bytes(20_000))
    done = CliRunner().invoke(app, ["policy", "show", str(tmp_path / "policy.toml")])
    assert done.exit_code == 0
    lines = [line for line in done.stdout.splitlines() if not line.startswith(str(tmp_path))]
    assert all(len(line) <= 80 for line in lines)
    assert any(line.split()[-5:] == ["47114711471147114", "private-sums", "1", "3", "0.02"] for line in lines)
    assert any(line.split()[-5:] == ["4712", "sum-ntk-fl", "1", "none", "0.02"] for line in lines)
    assert lines[-2] == "ε of one record within 365 days: 3 of 6; 3 are left"
