"""A site decides what leaves it: a run's terms, the site's policy.toml, and the site that holds one against the other.

    site = Site.of(context.node_config, context.node_id, memory=…)
    method, privacy = site.admit(Terms.parse(text), run)            # or a refusal, in one line
    reply = site.release(run, round, exchange, question, answer)    # in the ledger before it is returned

ε is the site's own: it follows from the noise that this site adds by the terms, for a record of this site, at the
policy's δ, and counts no promise of the server. Of a secure sum the noise of others counts where the policy says so.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ntkfl.errors import ConfigError, MessageError, Refused, unknown
from ntkfl.federation.config import build_method, describe_method
from ntkfl.methods import METHODS, Method
from ntkfl.methods.averaging.centralized import Samples
from ntkfl.methods.base import adds_noise, settle
from ntkfl.methods.sums.noisy_sums import NoisySums
from ntkfl.options import Options, read_from
from ntkfl.privacy.ledger import Ledger, LedgerEntry, MemoryLedger, sha256, spent_in_year
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_noise import spent
from ntkfl.progress import plural
from ntkfl.safe_parse import parse_json, read_toml
from ntkfl.user_code import is_code

SENT = ("rows", "updates", "sums", "samples")  # kinds of reply, as a policy calls them
ENVIRONMENT, FOLDER = "NTKFL_POLICY", "ledger"
_DIGEST = "^(sha256:[0-9a-f]{64})?$"
_MOST_BYTES, _EXCHANGES = 16_384, 8  # of terms; in a round, on average
_SLACK = 1e-9  # ε is found by bisection


def _refused(why: str) -> Refused:
    return Refused("policy", why)


class Terms(Options, title="the terms of a run"):
    """What a run asks of a client. It travels with every question, as text; its digest stands for it.

    Every option is spelled out, so that no default of the client's code decides anything.
    """

    method: dict[str, Any] = Field(description="name and every option")
    privacy: dict[str, Any] = Field(description="every setting of [privacy]")
    rounds: int = Field(ge=1, le=1_000_000)
    min_clients: int = Field(1, ge=1, description="clients in a round, at least")
    precision: Literal["float32", "float64"] = "float32"
    outputs: int = Field(ge=1)
    inputs: tuple[int, ...] = Field(description="shape of one input")
    shuffler: str = Field(
        "", pattern=_DIGEST, description="sha256:… of the key that replies are sealed for; none: no shuffler"
    )

    @staticmethod
    def of(method: Method, privacy: Privacy, **terms: Any) -> Terms:
        """The terms of a method; `ConfigError` where they ask for more rounds, or fewer clients, than ε is for."""
        found = Terms(method=describe_method(method), privacy=privacy.model_dump(mode="json"), **terms)
        most = privacy.budget_rounds
        if privacy.noisy and found.rounds > most:
            raise ConfigError(f"ε of {method.name} is for {most} rounds, and the run has {found.rounds}")
        if privacy.noisy and privacy.secure_sum and found.min_clients < privacy.noise_clients:
            raise ConfigError(f"ε counts on {privacy.noise_clients} clients: min_clients is {found.min_clients}")
        return found

    @staticmethod
    def parse(text: str) -> Terms:
        """Terms as `text` has written them, to the letter; `MessageError` for anything else."""
        if len(text) > _MOST_BYTES:
            raise MessageError(f"the run's terms have {len(text):,} characters, more than {_MOST_BYTES:,}")
        try:
            values = parse_json(text)
            terms = Terms(**values if isinstance(values, dict) else {"terms": values})
        except (ValueError, TypeError, ConfigError) as error:
            raise MessageError(f"the run's terms cannot be read: {str(error)[:300]}") from None
        if terms.text != text:
            raise MessageError("the run's terms are not as Terms.text writes them: a value is there twice, or left out")
        return terms

    @property
    def text(self) -> str:
        """As it travels: JSON with sorted keys and no spaces."""
        values = self.model_dump(mode="json")
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @property
    def digest(self) -> str:
        """Stands for the terms in a ledger, and in what a shuffler pins for a run."""
        return sha256(self.text.encode())


class Agreed(NamedTuple):
    """What a run's terms build: its method, and what its clients do to hide."""

    method: Method
    privacy: Privacy

    @property
    def kinds(self) -> list[str]:
        """What clients send, in the words of a policy. Whole samples travel as rows, and are none."""
        kinds = {"samples" if issubclass(r, Samples) else r.kind for r in self.method.replies.values()}
        return sorted("updates" if kind == "update" else kind for kind in kinds)


class Limits(Options, title="[privacy]"):
    """[privacy]: what a record of this site may lose, over all runs. Without noise only methods named in `methods`."""

    epsilon_per_run: float = Field(gt=0)
    epsilon_per_year: float = Field(gt=0, description="sum over the runs of the last 365 days")
    delta: float = Field(1e-6, gt=0, lt=1, description="of each run")
    noise_clients: int = Field(1, ge=1, description="of secure sums: clients whose noise counts, this one among them")

    def model_post_init(self, _: object) -> None:
        if self.epsilon_per_run > self.epsilon_per_year:
            raise ConfigError(
                f"epsilon_per_run is above epsilon_per_year = {self.epsilon_per_year:g}: no run could use it"
            )


class Policy(Options, title="a policy"):
    """policy.toml: what may leave a site."""

    methods: tuple[str, ...] = Field(min_length=1, description="methods, or kinds of reply, as in SENT")
    secure_sum: Literal["required", "optional"] = "optional"
    shuffler: str = Field("", pattern=_DIGEST, description="sha256:… of the shuffler's public key; none: any shuffler")
    min_clients: int = Field(1, ge=1, description="clients in a round, at least")
    privacy: Limits | None = None
    code: tuple[str, ...] = Field((), description="sha256:… of ntkfl and of the app; none: any code")

    def model_post_init(self, _: object) -> None:
        for name in self.methods:
            if not is_code(name) and name not in (*METHODS, *SENT):
                raise unknown("method or kind of reply", name, (*METHODS, *SENT))

    @staticmethod
    def read(path: Path) -> Policy:
        """From a TOML file; `ConfigError` in one line that names it."""
        with read_from(path):
            return Policy(**read_toml(path))

    def check_code(self, terms: Terms) -> None:
        """Refuse terms that would import code: a module must be imported by the app already, or named in `methods`."""
        for name in filter(is_code, terms.method.values()):
            module = name.partition(":")[0]
            library = module.partition(".")[0] in sys.stdlib_module_names
            if name not in self.methods and (library or module not in sys.modules):
                raise _refused(f"the terms name code of this site's, {name!r}: import its module in the app")

    def check(self, terms: Terms, agreed: Agreed) -> None:
        """Refuse terms that this policy does not allow, in one line; `agreed` is what they build."""
        name, privacy, sends = agreed.method.name, agreed.privacy, f"sends {' and '.join(agreed.kinds)}"
        if name not in self.methods and not {*agreed.kinds} <= {*self.methods}:
            raise _refused(f"{name} {sends}, and the policy allows {', '.join(self.methods)}")
        if terms.min_clients < self.min_clients:
            raise _refused(
                f"the run promises rounds of {terms.min_clients} clients or more (min_train_nodes of its Strategy), "
                f"and the policy asks for {self.min_clients}"
            )
        if self.secure_sum == "required" and not privacy.secure_sum:
            raise _refused(f"{name} comes without secure sums, which the policy requires")
        if self.shuffler and privacy.sealed and terms.shuffler != self.shuffler:
            raise _refused(f"the shuffler is {terms.shuffler or 'unnamed'}, not the policy's {self.shuffler}")
        if self.privacy is None or (not adds_noise(agreed.method) and name in self.methods):
            return
        loss = terms.method.get("loss")
        if is_code(loss) and loss not in self.methods:
            raise _refused(f"ε is for losses of one record each, and nobody vouches for {loss!r}: name it in methods")
        epsilon = self.epsilon(agreed, terms.rounds)
        if epsilon is None:
            raise _refused(f"{name} {sends} without noise of this site's: no ε, which [privacy] limits")
        if epsilon > (most := self.privacy.epsilon_per_run) + _SLACK:
            found = f"ε would be {epsilon:.4g} at δ = {self.privacy.delta:g} for a record of this site"
            counted = f"noise_clients: the policy counts {self.privacy.noise_clients}, the run {privacy.noise_clients}"
            raise _refused(f"{found} by the noise that counts here ({counted}), above epsilon_per_run = {most:g}")

    def delta(self, agreed: Agreed) -> float:
        """The δ at which ε is counted here: the policy's own, or without [privacy] the run's."""
        return self.privacy.delta if self.privacy else agreed.privacy.delta

    def epsilon(self, agreed: Agreed, answers: int) -> float | None:
        """ε of a record after this many `answers`; None where this site adds no noise.

        ρ of a release falls with the number of clients whose noise counts. Those of others count in a secure sum
        alone: elsewhere the server sees this site's reply.
        """
        method, own = agreed
        if not isinstance(method, NoisySums) or not (releases := method.releases(own, answers)):
            return None
        counted = self.privacy.noise_clients if self.privacy and own.secure_sum else 1
        worse = own.noise_clients / min(counted, own.noise_clients)
        return spent([(worse * rho, times) for rho, times in releases], self.delta(agreed))


_SIMULATED = Policy(methods=("rows", "updates", "sums"))


class Site:
    """A policy and a ledger. Without a policy nothing but samples themselves is refused, as in a simulation; what a run
    says of itself, its rounds and its noise, holds all the same.
    """

    def __init__(self, policy: Policy | None, ledger: Ledger, node: str = "") -> None:
        self.policy, self.ledger, self.node = policy or _SIMULATED, ledger, node
        self.simulated = policy is None
        self._admitted: dict[str, tuple[Terms, Agreed]] = {}

    @staticmethod
    def of(
        node_config: Mapping[str, Any],
        node: object = "",
        policy: Path | str | None = None,
        memory: MutableMapping[str, Any] | None = None,
    ) -> Site:
        """The site of the policy that its owner set: `policy` in Flower's --node-config, or NTKFL_POLICY; or the app.

        Its ledger is the folder `ledger` beside the file, one for each partition where nodes have these. There a
        partition is the node of the ledger: a SuperNode that starts anew has another id, and goes on with its entries.
        """
        found = node_config.get("policy") or os.environ.get(ENVIRONMENT) or policy
        if not found:
            _say_once("no policy.toml: as in a simulation all but samples may leave; `ntkfl policy new` writes one")
            return Site(None, MemoryLedger({} if memory is None else memory), str(node))
        path, partition = Path(str(found)), str(node_config.get("partition-id", ""))
        own = f"partition-{partition}" if partition else str(node)
        return Site(Policy.read(path), Ledger(path.parent / FOLDER / partition), own)

    def admit(self, terms: Terms, run: object, shuffler: str = "", seeded: bool = False) -> Agreed:
        """What the terms build, if the policy allows them; once per run it prints what is about to be promised.

        `shuffler` is the digest of the key that replies will be sealed for, `seeded` whether noise follows from a seed.
        """
        run = str(run)
        if not (0 < len(run) <= 64 and run.isprintable()):  # the server's word, for logs and files of ours
            raise _refused(f"a run called {run[:64]!r}: at most 64 printable characters are a name")
        self.policy.check_code(terms)
        method = build_method(terms.method)
        agreed = Agreed(method, settle(method, Privacy(**terms.privacy))[0])
        privacy = agreed.privacy
        if Terms.of(method, privacy, **terms.model_dump(exclude={"method", "privacy"})) != terms:
            raise _refused(f"the terms leave settings of {method.name} out, or call it by another name")
        if terms.shuffler != shuffler or (privacy.sealed and not shuffler and not self.simulated):
            why = f"replies go through {shuffler}, and the run's terms say {terms.shuffler or 'none'}"
            if not shuffler:
                through = "through=ntkfl.flower.Shuffler.from_config(context)"
                why = (
                    f"this run's replies go through a shuffler, and there is no shuffler here: give reply(…, {through})"
                )
            raise _refused(why)
        if seeded and privacy.noisy and not self.simulated:
            raise _refused("noise that follows from a seed hides nothing: leave seed out of reply(…)")
        self.policy.check(terms, agreed)
        self._check_running_code()
        with self.ledger.locked():
            known = [entry for entry in self.ledger.entries if entry.run == run]
            if known and known[0].terms != terms.digest:
                raise _refused(f"the terms of run {run} changed: {known[0].terms[:12]}…, {terms.digest[:12]}…")
            if not known:
                epsilon = self.policy.epsilon(agreed, terms.rounds)
                left = self._left(run, epsilon)
                self._enter("terms", run, terms, agreed)
                if not self.simulated:
                    print(self._promise(run, terms, agreed, epsilon, left), flush=True)
        self._admitted[run] = terms, agreed
        return agreed

    def release(self, run: object, round: int, exchange: int, question: bytes, make: Callable[[], bytes]) -> bytes:
        """The reply to a question, made by `make`, kept and entered in the ledger before it is returned.

        `make` sends nothing: what goes to a shuffler goes there after this returns. `round` is the question's own. The
        same question gets the same bytes; another one for the same round and exchange, one of an earlier round, and
        one beyond the terms' rounds are refused. Where noise is added there is one answer in a round.
        """
        run = str(run)
        if run not in self._admitted:
            raise _refused(f"run {run} has not been admitted")
        terms, agreed = self._admitted[run]
        name, reply = f"{round}-{exchange}", None
        while True:
            with self.ledger.locked():
                past = [e for e in self.ledger.entries if e.run == run and e.what == "reply"]
                if same := [e for e in past if (e.round, e.exchange) == (round, exchange)]:
                    self._check_again(same[0], question)
                    reply = self.ledger.kept(run, name) or reply
                    if reply is not None and sha256(reply) != same[0].reply:
                        raise _refused(f"round {round} of run {run} was answered, and its reply is gone")
                else:
                    epsilon = self._next(terms, agreed, run, round, past)
                    if reply is not None:
                        self.ledger.keep(run, name, reply, first=not past or past[-1].round < round)
                        about = {"round": round, "exchange": exchange, "question": sha256(question)}
                        about |= {"bytes": len(reply), "reply": sha256(reply)}
                        if epsilon is not None:
                            about |= {"epsilon": epsilon, "delta": self.policy.delta(agreed)}
                        self._enter("reply", run, terms, agreed, **about)
                if reply is not None:
                    return reply
            reply = make()  # takes long, and others may need the ledger

    def _enter(self, what: Literal["terms", "reply"], run: str, terms: Terms, agreed: Agreed, **about: Any) -> None:
        """Append an entry to the ledger, which the caller holds."""
        method = {"terms": terms.digest, "method": agreed.method.name}
        self.ledger.append(LedgerEntry(what=what, run=run, time=_clock(), node=self.node, **method, **about))

    def _check_again(self, entry: LedgerEntry, question: bytes) -> None:
        """Refuse another question for an answered exchange, and another node's reply."""
        where = f"round {entry.round}, exchange {entry.exchange} of run {entry.run} was answered"
        if entry.question != sha256(question):
            raise _refused(f"{where} to another question")
        if entry.node != self.node:
            by = f"by node {entry.node}, and this is {self.node}"
            raise _refused(f"{where} {by}: give each SuperNode a policy folder of its own, and a partition-id to keep")

    def _next(self, terms: Terms, agreed: Agreed, run: str, round: int, past: list[LedgerEntry]) -> float | None:
        """ε of the run after one more answer, where there may be one."""
        if not 1 <= round <= terms.rounds:
            raise _refused(f"round {round} is asked for, and the terms are for {terms.rounds} rounds")
        if past and round < past[-1].round:
            raise _refused(f"round {round} is asked for after round {past[-1].round}")
        if not agreed.privacy.noisy:
            if len(past) >= _EXCHANGES * terms.rounds:
                raise _refused(f"{len(past)} questions in {terms.rounds} rounds were answered: no more are")
            return None
        # One answer for each of the terms' rounds, in their order, so never more than ε is for: see Terms.of.
        if past and past[-1].round == round:
            raise _refused(f"{agreed.method.name} answers once in a round, and round {round} was answered")
        epsilon = self.policy.epsilon(agreed, len(past) + 1)
        self._left(run, epsilon)
        return epsilon

    def _left(self, run: str, epsilon: float | None) -> float:
        """ε that the year leaves after a run of so much; refuses what exceeds it."""
        limits, epsilon = self.policy.privacy, epsilon or 0.0
        if limits is None:
            return float("inf")
        left = limits.epsilon_per_year - spent_in_year(self.ledger.entries, _clock(), run)
        if epsilon > left + _SLACK:
            year = f"{max(0.0, left):.3g} of {limits.epsilon_per_year:g} are left of this year's ε"
            raise _refused(f"{year}, and the run takes {epsilon:.3g}")
        return left - epsilon

    def _promise(self, run: str, terms: Terms, agreed: Agreed, epsilon: float | None, left: float) -> str:
        """One line: what is sent, and what of ε it takes."""
        cost = "no noise, so no ε: replies may reveal records"
        if epsilon is not None:
            year = f"{left:.3g} are left this year" if self.policy.privacy else "the policy sets no limit"
            cost = f"ε = {epsilon:.3g} at δ = {self.policy.delta(agreed):g} for a record of this site; {year}"
        masked = "masked " if agreed.privacy.secure_sum else ""
        sent = f"sends {masked}{' and '.join(agreed.kinds)}"
        return f"policy: run {run} is accepted: {agreed.method.name}, {plural(terms.rounds, 'round')}, {sent}; {cost}"

    def _check_running_code(self) -> None:
        """Refuse code that the policy does not list; read anew each time, as an app may import more later."""
        if self.policy.code:
            for name, digest in running_code().items():
                if digest not in self.policy.code:
                    raise _refused(f"the code of {name} is {digest}, which the policy's `code` does not list")


def _clock() -> int:
    return int(time.time())


@cache
def _say_once(line: str) -> None:
    print(line, flush=True)


def running_code() -> Mapping[str, str]:
    """Digests by name: of ntkfl, and of every package in use by now that is not installed, such as a Flower app."""
    found, stdlib = {"ntkfl": Path(__file__).resolve().parents[1]}, Path(sysconfig.get_path("stdlib")).resolve()
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "").resolve()
        installed = path.is_relative_to(stdlib) or {"site-packages", "dist-packages"} & {*path.parts}
        top, depth = name.partition(".")[0], name.count(".") + (path.name == "__init__.py")
        if path.is_file() and path.suffix == ".py" and not installed and top not in found and not top.startswith("__"):
            found[top] = path.parents[depth - 1] if depth else path
    return {name: _digest_once(path) for name, path in found.items()}


def code_digest(path: Path) -> str:
    """SHA-256 of a package's Python files, by name and content."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    lines = [f"{sha256(file.read_bytes())} {file.relative_to(path.parent).as_posix()}\n" for file in files]
    return f"sha256:{sha256(''.join(lines).encode())}"


_digest_once = cache(code_digest)  # code that was read stays what it was
