"""Training in this process: clients are objects, everything else is as it is across machines.

`train` is for Python, `execute` for a configuration; both make a `Simulation` and run it.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ntkfl.data import NAMES, Federated
from ntkfl.devices import find_device
from ntkfl.errors import ConfigError, ModelError, NumericalError
from ntkfl.federation.byzantine import Byzantine
from ntkfl.federation.client import split_frozen
from ntkfl.federation.config import (
    RunConfig,
    build_model,
    describe_method,
    describe_settings,
    load_data,
    spelled_out,
)
from ntkfl.federation.run import Run
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.server import Server
from ntkfl.federation.transport import LocalTransport, Transport
from ntkfl.methods import Method, Task
from ntkfl.methods.base import fitted, kinds_of, settle
from ntkfl.methods.replies import by_samples
from ntkfl.methods.robust import Robust
from ntkfl.methods.sums.noisy_sums import guarantees, promises
from ntkfl.methods.sums.private_sums import noise_advice
from ntkfl.methods.task import statistics
from ntkfl.privacy.settings import Privacy
from ntkfl.progress import ProgressBar, percent, plural
from ntkfl.tangent.parameters import eager, flatten, full_precision, refuses_autocast, trainable
from ntkfl.version import __version__

_SENT = {
    "rows": "rows of samples (per-sample Jacobian, outputs, label)",
    "update": "a client's update",
    "sums": "sums over a client's samples",
}


def train(
    model: nn.Module,
    data: Federated,
    method: Method,
    *,
    rounds: int = 10,
    clients_per_round: int | None = None,
    seed: int = 0,
    hold_out: int = 0,
    stop_at: float | None = None,
    privacy: Privacy | None = None,
    robust: Robust | Literal["on"] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    callbacks: Sequence[object] | None = None,
) -> Run:
    """Train `model` over the clients of `data` with `method`. `run.model` is trained; the model given stays as it is.

    A round draws `clients_per_round` clients without replacement (20 by default, or all where there are fewer);
    everything random comes from `seed`, so that the same call on the same machine gives the same bits. `hold_out`
    clients are set aside as the server's validation set. Training ends early once the test accuracy is `stop_at`. With
    `out`, history and checkpoint are kept there after every round, the model when the run ends, and `resume` continues,
    bit for bit; without it nothing is written.

    `privacy` is what clients do to hide, such as `Privacy(secure_sum=True)`; what it leaves open is as the method has
    it. `robust` bounds what Byzantine clients can do: "on", or single bounds; none by default.

    A callback is a function, called after each round with its line of `history.jsonl` and of `timings.jsonl`; or an
    object with `on_round(record, timing)`, and with `on_begin(rounds)`, `on_start(note)` or `on_end()` if it wants
    those. When it is called the folder holds the round, so what it raises stops the run and loses nothing. By default a
    terminal or notebook shows a line of progress; `callbacks=[]` shows nothing, `[ntkfl.Progress()]` the line in a log.
    A run that ends worse than a constant prediction is warned of (`run.failure`).
    """
    with full_precision():
        simulation = Simulation(
            model,
            data,
            method,
            clients_per_round=clients_per_round,
            seed=seed,
            hold_out=hold_out,
            privacy=privacy,
            robust=robust,
            device=device,
        )
        run = simulation.run(rounds, stop_at=stop_at, out=out, resume=resume, callbacks=callbacks)
    if run.failure:
        warnings.warn(run.failure, stacklevel=2)
    return run


def execute(
    config: RunConfig,
    *,
    data: Federated | None = None,
    out: Path | None = None,
    resume: bool = False,
    device: str | None = None,
    callbacks: Sequence[object] = (),
) -> Run:
    """Train what the configuration says; `data` are what it names, where they are loaded already."""
    data = data or load_data(config)
    config = config.with_cohort(len(data))
    settings = spelled_out(config)
    if not config.data.own:
        settings["data"].setdefault("clients", len(data))  # those that the data name
    return simulation_of(config, data, device).run(
        config.rounds, stop_at=config.stop_at, settings=settings, out=out, resume=resume, callbacks=callbacks
    )


def simulation_of(config: RunConfig, data: Federated, device: str | None = None) -> Simulation:
    """What the configuration says, before its first round; `data` are what it names."""
    return Simulation(
        build_model(config, data),
        data,
        config.built_method,
        clients_per_round=config.with_cohort(len(data)).clients_per_round,
        seed=config.seed,
        hold_out=config.hold_out,
        privacy=config.privacy,
        robust=config.robust,
        device=device,
        byzantine=config.byzantine,
        repeatable=config.repeatable,
    )


class Simulation:
    """A federation in this process, and its server: everything is checked and built here, before the first round.

    `clients` is the way to the simulated clients, `task` the network with its loss, `server` plays the rounds. Where
    `privacy` asks for projected inputs, P follows from `seed`, which is no secret. With `byzantine`, some clients
    cheat. Unless `repeatable`, what clients draw, such as noise, comes from the operating system.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Federated,
        method: Method,
        *,
        clients_per_round: int | None = None,
        seed: int = 0,
        hold_out: int = 0,
        privacy: Privacy | None = None,
        robust: Robust | Literal["on"] | None = None,
        device: str | torch.device | None = None,
        byzantine: Byzantine | None = None,
        repeatable: bool = True,
    ) -> None:
        if not isinstance(method, Method):
            raise ConfigError(f"method must be an instance, with brackets: ntkfl.methods.NTKFL(), not {method!r:.80}")
        if not isinstance(data, Federated):
            raise ConfigError(
                f"data must be dealt to clients: give dataset.partition(…) or from_clients(…), not {data!r:.60}"
            )
        privacy, robust = settle(method, privacy, robust)
        clients, held = data.hold_out(hold_out, seed=seed) if hold_out else (data, None)
        cohort = min(20, len(clients)) if clients_per_round is None else clients_per_round
        if hold_out and cohort in range(len(clients), len(data) + 1):
            cohort = len(clients)  # who asked for more than are left asked for all
        if not isinstance(cohort, int) or not 1 <= cohort <= len(clients):
            raise ConfigError(
                f"clients_per_round must be from 1 to all {len(clients)} clients, not {clients_per_round}"
            )
        method = fitted(method, model, data.output_dim, cohort == len(clients))
        if data.standardization and not data.standardization.public and (privacy.sealed or privacy.noisy):
            raise ConfigError(
                "standardising tells the server each client's mean and deviation, which these settings would hide: "
                "give public numbers as --set 'data.mean=[…]' --set 'data.std=[…]' (in Python: standardized(mean, std))"
            )
        if privacy.noisy and not data.classes_declared:
            raise ConfigError(
                "differential privacy needs the classes to be declared: collected from the labels, they tell which "
                'labels occur; give them as --set \'data.classes=["a", "b"]\' (in Python: from_file(…, classes=…))'
            )
        if method.loss == "ce" and data.classes is None:
            raise ConfigError(
                "loss 'ce' needs class labels, but the targets are real-valued: use loss 'mse' (--set loss=mse)"
            )
        self.model, self.all_data, self.data, self.method = model, data, clients, method
        self.privacy, self.robust, self.byzantine, self.repeatable = privacy, robust, byzantine, repeatable
        self.clients_per_round, self.seed, self.hold_out = cohort, seed, hold_out
        place = find_device(device) if device is not None else flatten(model).device
        with eager(model) as own:
            trained, features = split_frozen(own, privacy, place)
            trained = copy.deepcopy(trained).to(place)
        self.task = task = Task(
            trained,
            data.output_dim,
            method.loss,
            label_smoothing=method.label_smoothing,
            privacy=privacy,
            robust=robust,
            total_clients=len(clients),
        )
        self.clients = local = LocalTransport(clients, task, method, seed, repeatable=repeatable, features=features)
        if byzantine is not None:
            byzantine.check(method)
            local.byzantine = byzantine.drawn(seed, len(clients))
            local.respond = partial(byzantine.reply, local.byzantine)
        test = local.place(data.test)
        self._check_model(test[0][:2])
        task.example = torch.zeros_like(test[0][:1]), torch.zeros_like(test[1][:1])
        task.shared = None if data.shared is None else local.place(data.shared)
        if held is not None:
            xs, ys = zip(*(held.client(i) for i in range(len(held))), strict=True)
            task.validation = local.place((torch.cat(xs), torch.cat(ys)))
        transport: Transport = local
        if privacy.sealed:
            from ntkfl.federation.shuffled import LocalShuffler  # sealing is an extra: only shuffled runs need it

            transport = LocalShuffler(local, task, method, local.rows, seed)
        new_noise = privacy.noisy and not repeatable
        self.server = Server(
            model, task, method, transport, test, clients_per_round=cohort, seed=seed, count_attempts=new_noise
        )

    def run(
        self,
        rounds: int = 10,
        *,
        stop_at: float | None = None,
        out: Path | str | None = None,
        resume: bool = False,
        callbacks: Sequence[object] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Run:
        """Play the rounds. `settings` are what the folder says of model, data and privacy, where names can say it."""
        if not isinstance(rounds, int) or rounds < 1:
            raise ConfigError(f"rounds must be a whole number of at least 1, got {rounds!r}")
        heard = [Progress(log=False)] if callbacks is None else list(callbacks)
        for callback in heard:
            if not (callable(callback) or hasattr(callback, "on_round") or hasattr(callback, "on_start")):
                raise ConfigError(f"a callback is a function, or an object with on_round: not {callback!r}")
        folder = RunFolder(out) if out is not None else None
        if folder and resume and self.server.count_attempts:
            self.task.failed_rounds = folder.attempts - folder.load_checkpoint()[0]
        described = self._described(rounds, stop_at, settings)
        try:
            _tell(heard, "on_begin", rounds)
            for line in self._notes(rounds, described["promises"]):
                _tell(heard, "on_start", line)
            for line in self._warnings(rounds):
                if callbacks is None:
                    warnings.warn(line, stacklevel=3)  # of `train`'s caller, who has no display of lines
                _tell(heard, "on_start", f"warning: {line}")
            trained, history, timings = self.server.run(
                folder, described, resume=resume, on_round=partial(_tell, heard, "on_round")
            )
        finally:
            _tell(heard, "on_end")
        return Run(trained, history, timings, described, self.server.checkpoint(), self.method)

    def _described(self, rounds: int, stop_at: float | None, settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the run's folder says of it: `settings`, or what identifies model and data where names cannot. Where
        noise protects records, nothing exact about training data is among it: no client's name, no number of samples,
        no digest of the data.
        """
        data, exact, described = self.data, not self.privacy.noisy, dict(settings or {})
        if settings is None:
            found = self.all_data.describe() | {"fingerprint": self.all_data.fingerprint()}
            hidden = () if exact else ("samples", "fingerprint")
            start = flatten(self.model).detach()
            with eager(self.model) as own:
                model = {"class": type(own).__name__, "weights": start.numel()}
            described = {
                "ntkfl": __version__,
                "simulation": True,
                "clients_per_round": self.clients_per_round,
                "seed": self.seed,
                "hold_out": self.hold_out,
                **describe_settings(self.privacy, self.robust),
                "data": {name: value for name, value in found.items() if name not in hidden},
                "model": model | {"start": hashlib.sha256(start.cpu().numpy().tobytes()).hexdigest()},
            }
        shape: dict[str, Any] = {"inputs": list(data.input_shape), "outputs": data.output_dim}
        shape["precision"] = str(self.task.like.dtype).removeprefix("torch.")
        if self.clients.projection is not None:  # which seed projects: a name for it, never the seed
            shape["key_id"] = self.clients.secret.key_id
        # For people who look at the run, and for files read later: messages have numbers.
        names = {"clients": data.client_names if exact else (), "classes": data.class_names}
        names |= {"features": data.feature_names}
        optional = {
            "byzantine": self.byzantine and self.byzantine.model_dump(mode="json"),
            "constant": self.server.constant,
            # A run goes on with the data that it began with; those of the catalog have checksums of their own.
            "fingerprint": settings is not None and exact and data.name not in NAMES and self.all_data.fingerprint(),
            "names": {kind: listed for kind, listed in names.items() if listed},
            # The trained model needs it for whatever inputs come later.
            "standardization": data.standardization
            and data.standardization.model_dump(mode="json", exclude_defaults=True),
        }
        described |= {"rounds": rounds, "stop_at": stop_at, "shape": shape}
        described |= {"method": describe_method(self.method), "promises": self._promises(rounds)}
        return described | {name: value for name, value in optional.items() if value}

    def _promises(self, rounds: int) -> dict[str, Any]:
        """The table `promises` of the run's folder: guarantees with what they assume, for a client in every round, and
        failed rounds counted; whether replies are summed under masks; `floor`, fewest clients whose replies are
        released; what each role sees; and which samples no guarantee is for.
        """
        found = guarantees(self.method, self.task, rounds + self.task.failed_rounds)
        test = plural(len(self.data.test[1]), "test sample")
        drawn = ", a random part of the file's rows" if "test" in self.data.description else ""
        held = f" and {self.hold_out} held-out clients" if self.hold_out else ""
        table: dict[str, Any] = {
            "secure_sum": self.privacy.secure_sum,
            "sees": _sees(self.method, self.privacy),
            "sums": sum_promise(self.privacy) or None,
            "floor": self.server.transport.floor,
            "uncovered": f"the {test}{drawn}{held}: the server measures on them as they are" if found else None,
        }
        return {name: value for name, value in table.items() if value is not None} | {"guarantees": found}

    def _notes(self, rounds: int, promised: Mapping[str, Any]) -> list[str]:
        """Lines on what the run promises and on what the network decided, before the first round."""
        lines = [*promises(self.method, self.task, self.clients_per_round, rounds), sum_promise(self.privacy)]
        if self.privacy.epsilon:
            why = (
                "the noise follows from the seed, and hides nothing" if self.repeatable else "one process has all data"
            )
            lines.append(f"simulated: {why}")
        lines += [*self.task.notes, self._whole_targets()]
        if uncovered := promised.get("uncovered"):
            lines.append(f"not covered: {uncovered}")
        return [line for line in lines if line]

    def _warnings(self, rounds: int) -> list[str]:
        """Lines on settings that will not do what their user may expect."""
        lines, privacy, method = list[str](), self.privacy, self.method
        records, most = sum(self.data.sizes), privacy.sum_samples
        if "update" not in kinds_of(method) and statistics(self.task.model):
            lines.append(
                f"the network has batch normalisation, and {method.name} trains weights alone: running means and "
                "variances stay as they are; use nn.GroupNorm, or a method whose clients train locally (fedavg)"
            )
        if not (privacy.noisy or self.data.standardization) and (apart := _apart(self.data.rows.x)) > 30:
            lines.append(
                f"some features are {apart:.0f} times as large as others: scale them (ntkfl train --standardize)"
            )
        drawn = records / len(self.data) * self.clients_per_round
        lines += noise_advice(method, self.task, drawn, self.clients_per_round, rounds)
        if (privacy.epsilon or 0) > 10:
            lines.append(f"epsilon = {privacy.epsilon:g} promises next to nothing: 10 or less is usual")
        if privacy.epsilon and privacy.delta * records >= 1:
            lines.append(
                f"delta = {privacy.delta:g} allows publishing one record of the {records} there are: "
                f"take a delta far below {1 / records:.1g}"
            )
        large = sum(size > most for size in self.data.sizes) if privacy.secure_sum and by_samples(method) else 0
        if large:
            have, count = ("has", "counts") if large == 1 else ("have", "count")
            clients = plural(large, "client")
            lines.append(f"{clients} {have} more records than sum_samples ({most:,}) and {count} for less")
        return lines

    def _whole_targets(self) -> str:
        """What to say of labels where squared error may be meant for regression."""
        if self.method.loss != "mse" or self.data.classes is None or self.data.class_names or self.data.name in NAMES:
            return ""
        return "whole-number targets are classes here: for regression make floats of them (of a file: --targets real)"

    def _check_model(self, x: torch.Tensor) -> None:
        """Fail before the first round where the model cannot be trained on inputs such as x [n, …]."""
        task, outputs = self.task, self.data.output_dim
        if half := {p.dtype for p in trainable(task.model).values()} & {torch.float16, torch.bfloat16}:
            raise ModelError(
                f"the model's weights are {str(half.pop()).removeprefix('torch.')}, in which steps get lost: train it "
                "in float32, model.float(), and convert run.model afterwards"
            )
        try:
            with refuses_autocast(task.model):
                f = task.predict(task.like, x)
        except ModelError:
            raise
        except Exception as error:  # whatever a user's model raises
            reason = str(error).split("\n")[0]
            raise ModelError(f"the model fails on this data's inputs, {list(x.shape[1:])} each: {reason}") from error
        if tuple(f.shape) != (len(x), outputs):
            hint = self._whole_targets()
            raise ModelError(
                f"the model maps {len(x)} samples to {list(f.shape)}; the data need [{len(x)}, {outputs}] "
                f"(by the largest label, or the targets' width){hint and f'; {hint}'}"
            )
        if not bool(task.like.isfinite().all()):
            raise NumericalError("the model's weights are not finite before training")


def sum_promise(privacy: Privacy) -> str:
    """What masks promise, and that a total without noise has no ε, in a line; empty where replies are not summed."""
    if not privacy.secure_sum:
        return ""
    return f"secure sums: only totals are seen unless server and shuffler collude{'' if privacy.epsilon else '; no ε'}"


def _sees(method: Method, privacy: Privacy) -> dict[str, str]:
    """By role, in the order of what it sees."""
    reply = " and ".join(_SENT[kind] for kind in sorted(kinds_of(method)))
    if not privacy.sealed:
        return {"aggregator": f"{reply}, under the client's name", "others": "the model"}
    aggregator, sealed = f"{reply}, without senders", "sealed rows, equally many of each client"
    if privacy.secure_sum:
        aggregator = "the total over a round's clients and how many they are; of a single client nothing"
        sealed = "sealed vectors and seeds of masks"
    shuffler = f"who takes part; {sealed}; the model"
    return {"aggregator": aggregator, "shuffler": shuffler, "key server": "who is enrolled", "others": "the model"}


def _apart(x: torch.Tensor) -> float:
    """How many times larger than the smallest the largest feature of a table x [N, d] is, by root mean squares; of
    other inputs, and of columns that are zero, nothing.
    """
    sizes = x.square().mean(0).sqrt() if x.ndim == 2 and x.is_floating_point() else x.new_ones(1, dtype=torch.float32)
    sizes = sizes[sizes > 0]
    return float(sizes.max() / sizes.min()) if len(sizes) else 1.0


def _tell(callbacks: Sequence[object], what: str, *about: object) -> None:
    """Call this method of every callback that has it, in the order given; a function hears rounds."""
    for callback in callbacks:
        heard = getattr(callback, what, callback if what == "on_round" else None)
        if callable(heard):
            heard(*about)


class Progress(ProgressBar):
    """Rounds, accuracy and the time left on standard error: a bar in a terminal, in a notebook or log a line every ten
    seconds or so. With `log=False`, not in a log.
    """

    def __init__(self, log: bool = True) -> None:
        super().__init__(0)
        self.console.quiet = not (log or self.live or self.console.is_jupyter)

    def on_begin(self, rounds: int) -> None:
        """Show the bar, where somebody can see it."""
        self.total, self.done = rounds, 0.0
        self._count(0, f"training, {plural(rounds, 'round')}")
        self.__enter__()

    def on_round(self, record: Record, timing: Record) -> None:
        """One round further; the line says the accuracy, or the loss of real-valued targets."""
        accuracy, loss = record["test_accuracy"], record["test_loss"]
        reached = "" if loss is None else f", test loss {loss:.4g}"
        if accuracy is not None:
            reached = f", test accuracy {percent(accuracy)}"
        if not self.done:  # the first round heard of is a later one where a run was resumed
            self.done = self.skipped = record["round"] - 1
        self.end(f"round {record['round']} of {self.total}{reached}")

    def on_end(self) -> None:
        """Take the bar away, and leave its last line."""
        self.__exit__()
        self.console.print(self.what, soft_wrap=True)
