"""Training in this process: clients are objects, everything else is as it is across machines."""

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
from ntkfl.data.moments import Standardization
from ntkfl.data.scales import scale_advice
from ntkfl.devices import find_device
from ntkfl.errors import ConfigError, ModelError, NumericalError
from ntkfl.federation.build import build_model, load_data, spelled_out
from ntkfl.federation.byzantine import Byzantine, ByzantineClients
from ntkfl.federation.callbacks import Callback, CallbackList, Progress
from ntkfl.federation.config import RunConfig, describe_method, describe_settings
from ntkfl.federation.evaluation import OwnTestSet
from ntkfl.federation.feature_cache import split_frozen
from ntkfl.federation.local import LocalTransport, SimulatedClients
from ntkfl.federation.privacy_statement import privacy_statement, sum_promise
from ntkfl.federation.run import Run
from ntkfl.federation.run_folder import RunFolder, without_draw
from ntkfl.federation.server import Server
from ntkfl.federation.transport import Transport
from ntkfl.methods import Method, Task
from ntkfl.methods.base import fitted, kinds_of, settle
from ntkfl.methods.replies import by_samples
from ntkfl.methods.robust import Robust
from ntkfl.methods.sums.noisy_sums import promises
from ntkfl.methods.sums.private_sums import noise_advice
from ntkfl.methods.task import statistics
from ntkfl.models.backbone import flat_hint
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sum_accounting import Participation
from ntkfl.progress import plural
from ntkfl.tangent.jacobian import HALF_TYPES
from ntkfl.tangent.model_check import refuses_autocast
from ntkfl.tangent.parameters import eager, flatten, full_precision, trainable
from ntkfl.version import __version__


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
    callbacks: Sequence[Callback] | None = None,
) -> Run:
    """Train `model` over the clients of `data` with `method`. `run.model` is trained; the model given stays as it is.

    A round draws `clients_per_round` clients without replacement (20 by default, or all where there are fewer);
    everything random comes from `seed`, so that the same call on the same machine gives the same bits. `hold_out`
    clients are set aside as the server's validation set. Training ends early once the test accuracy is `stop_at`. With
    `out`, history and checkpoint are kept there after every round, the model when the run ends, and `resume` continues,
    bit for bit; without it nothing is written.

    `privacy` is what clients do to hide, such as `Privacy(secure_sum=True)`; what it leaves open is as the method has
    it. `robust` bounds what Byzantine clients can do: "on", or single bounds; none by default.

    `callbacks` are called as the run proceeds; if none are given, a terminal or notebook shows rounds, accuracy and the
    time left as one line. `callbacks=[]` shows nothing, `callbacks=[ntkfl.Progress()]` shows the line in a log too.
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
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train what the configuration says; `data` are what it names, where they are loaded already."""
    data = data or load_data(config)
    config = config.with_cohort(len(data))
    settings = without_draw(spelled_out(config))
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
    """A federation in this process, and its server. Where `privacy` asks for projected inputs, P follows from `seed`,
    which is no secret. With `byzantine`, some clients cheat. Unless `repeatable`, what clients draw, such as noise,
    comes from the operating system.
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
            raise ConfigError(f"method must be an instance such as ntkfl.methods.NTKFL(), not {method!r}")
        if not isinstance(data, Federated):
            raise ConfigError(
                f"data must be dealt to clients, as by dataset.partition(…) or from_clients: not {data!r:.60}"
            )
        self.privacy, self.robust = settle(method, privacy, robust)
        self.model, self.all_data, self.seed, self.hold_out = model, data, seed, hold_out
        self.data, held = data.hold_out(hold_out, seed=seed) if hold_out else (data, None)
        self.clients_per_round = min(20, len(self.data)) if clients_per_round is None else clients_per_round
        if not isinstance(self.clients_per_round, int) or not 1 <= self.clients_per_round <= len(self.data):
            raise ConfigError(
                f"clients per round must be from 1 to the {len(self.data)} clients there are, got {clients_per_round}"
            )
        everyone = self.clients_per_round == len(self.data)
        self.method = method = fitted(method, model, data.output_dim, everyone)
        if data.standardization is not None and self.privacy.hides_clients:
            raise ConfigError(
                "standardising tells the server each client's mean and deviation, which these settings would hide: "
                "leave standardize out, or scale inputs by public numbers"
            )
        if method.loss == "ce" and data.classes is None:
            raise ConfigError("loss 'ce' needs class labels, but the targets are real-valued: use loss 'mse'")
        self.device = find_device(device) if device is not None else flatten(model).device
        with eager(model) as own:
            trained, features = split_frozen(own, self.privacy, self.device)
            trained = copy.deepcopy(trained).to(self.device)
        self.task = Task(
            trained,
            data.output_dim,
            method.loss,
            label_smoothing=method.label_smoothing,
            privacy=self.privacy,
            robust=self.robust,
            total_clients=len(self.data),
        )
        self.repeatable = repeatable
        self.clients = SimulatedClients(self.data, self.task, method, seed, features=features)
        self.clients.repeatable = repeatable
        self.test = self.clients.place(data.test)
        self._check_model()
        self.task.example = torch.zeros_like(self.test[0][:1]), torch.zeros_like(self.test[1][:1])
        cheats = ByzantineClients.of(byzantine, method, seed, len(self.data), self.clients.rows)
        if cheats is not None:
            self.clients.respond = cheats.answer
        self.task.shared = None if data.shared is None else self.clients.place(data.shared)
        if held is not None:
            batches = [held.client(i) for i in range(len(held))]
            self.task.validation = self.clients.place(
                (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
            )
        self.byzantine, self.local = byzantine, LocalTransport(self.clients, cheats)
        self.server = Server(
            model,
            self.task,
            method,
            self._transport(),
            OwnTestSet(self.test, self.task.validation),
            clients_per_round=self.clients_per_round,
            seed=seed,
        )

    def _transport(self) -> Transport:
        if not (self.privacy.shuffle or self.privacy.secure_sum):
            return self.local
        from ntkfl.federation.local_shuffler import LocalShuffler  # sealing is an extra: only shuffled runs need it

        return LocalShuffler(self.local, self.task, self.method, self.clients.rows, self.seed)

    def run(
        self,
        rounds: int = 10,
        *,
        stop_at: float | None = None,
        out: Path | str | None = None,
        resume: bool = False,
        callbacks: Sequence[Callback] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Run:
        """Play the rounds. `settings` overrides what the folder says of the run."""
        if not isinstance(rounds, int) or rounds < 1:
            raise ConfigError(f"rounds must be a whole number of at least 1, got {rounds!r}")
        told = CallbackList([Progress(log=False)] if callbacks is None else callbacks)
        folder = RunFolder(out) if out is not None else None
        described = self._described(rounds, stop_at, settings)
        try:
            told.tell("on_begin", rounds)
            for line in self._notes(rounds, described["promises"]):
                told.tell("on_start", line)
            for line in self._warnings(rounds):
                if callbacks is None:
                    warnings.warn(line, stacklevel=3)  # of `train`'s caller, who has no display of lines
                told.tell("on_start", f"warning: {line}")
            return self.server.run(folder, described, resume=resume, on_round=partial(told.tell, "on_round"))
        finally:
            told.tell("on_end")

    def _described(self, rounds: int, stop_at: float | None, settings: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the run's folder says of it."""
        said = dict(self._made_in_python() if settings is None else settings)
        said |= {"rounds": rounds, "stop_at": stop_at, "shape": self.shape()}
        said |= {"method": describe_method(self.method), "promises": self._promises(rounds)}
        if self.byzantine is not None:
            said |= {"byzantine": self.byzantine.model_dump(mode="json")}
        said |= {"constant": self.server.constant} if self.server.constant else {}
        data = self.data
        names = {"clients": data.client_names, "classes": data.class_names, "features": data.feature_names}
        if any(names.values()):  # for people who look at the run, and for files read later: messages have numbers
            said |= {"names": {kind: listed for kind, listed in names.items() if listed}}
        if data.standardization is not None:  # the trained model needs it for whatever inputs come later
            said |= {"standardization": Standardization.of(data.standardization).model_dump(mode="json")}
        return said

    def _made_in_python(self) -> dict[str, Any]:
        """What identifies model and data, where names cannot."""
        weights = flatten(self.model).detach().cpu()
        start = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        with eager(self.model) as own:
            kind = type(own).__name__
        return {
            "ntkfl": __version__,
            "simulation": True,
            "clients_per_round": self.clients_per_round,
            "seed": self.seed,
            "hold_out": self.hold_out,
            **describe_settings(self.privacy, self.robust),
            "data": self.all_data.describe() | {"fingerprint": self.all_data.fingerprint()},
            "model": {"class": kind, "weights": weights.numel(), "start": start},
        }

    def _notes(self, rounds: int, promised: Mapping[str, Any]) -> list[str]:
        """Lines on what the run promises and on what the network decided, before the first round."""
        lines = [*promises(self.method, self.task, self.clients_per_round, rounds), sum_promise(self.privacy)]
        if self.privacy.epsilon:
            noise = (
                "the noise follows from the seed, and hides nothing" if self.repeatable else "one process has all data"
            )
            lines.append(f"simulated: {noise}")
        lines += [*self.task.notes, self._whole_targets().removeprefix("; ")]
        if uncovered := promised.get("uncovered"):
            lines.append(f"not covered: {uncovered}")
        return [line for line in lines if line]

    def _warnings(self, rounds: int) -> list[str]:
        """Lines on settings that will not do what their user may expect."""
        lines = []
        if "update" not in kinds_of(self.method) and statistics(self.task.model):
            lines.append(
                f"the network has batch normalisation, and {self.method.name} trains weights alone: running means and "
                "variances stay as they are, which costs accuracy unless they come pretrained; use nn.GroupNorm in its "
                "place, or a method whose clients train locally (fedavg)"
            )
        samples = sum(self.data.sizes) / len(self.data) * self.clients_per_round
        lines += noise_advice(self.method, self.task, samples, self.clients_per_round, rounds)
        records = sum(self.data.sizes)
        if self.privacy.epsilon and self.privacy.delta * records >= 1:
            lines.append(
                f"delta = {self.privacy.delta:g} allows publishing one record of the {records} there are: "
                f"take a delta far below {1 / records:.1g}"
            )
        lines += scale_advice(self.all_data, self.privacy.hides_clients)
        most = self.privacy.sum_samples
        counted = self.privacy.secure_sum and by_samples(self.method)
        large = sum(size > most for size in self.data.sizes) if counted else 0
        if large:
            have, count = ("has", "counts") if large == 1 else ("have", "count")
            lines.append(
                f"{plural(large, 'client')} {have} more records than sum_samples ({most:,}) and {count} for less"
            )
        return lines

    def _whole_targets(self) -> str:
        """What to say of labels where squared error may be meant for regression."""
        if self.method.loss != "mse" or self.data.classes is None or self.data.class_names or self.data.name in NAMES:
            return ""
        return "; whole-number targets are classes here: for regression make them with targets='real' (--targets real)"

    def _promises(self, rounds: int) -> dict[str, Any]:
        """What such a run promises, if a client is in every round and has one sample."""
        run = Participation(rounds, self.clients_per_round, len(self.data), rounds, simulated=True)
        drawn = ", a random part of the file's rows" if "test" in self.data.description else ""
        held = f" and {self.hold_out} held-out clients" if self.hold_out else ""
        samples = plural(len(self.test[1]), "test sample")
        uncovered = f"the {samples}{drawn}{held}: the server measures on them as they are"
        return privacy_statement(self.method, self.task, run, self.server.transport.floor, uncovered)

    def shape(self) -> dict[str, Any]:
        """What the network takes and gives, and which seed projects: a name for it, never the seed."""
        shape = {"inputs": list(self.data.input_shape), "outputs": self.data.output_dim}
        named = {"key_id": self.clients.secret.key_id} if self.clients.projection is not None else {}
        return {**shape, "precision": str(self.task.like.dtype).removeprefix("torch."), **named}

    def _check_model(self) -> None:
        """Fail before the first round where model and data do not fit."""
        x = self.test[0][:2]
        if half := {p.dtype for p in trainable(self.task.model).values()} & set(HALF_TYPES):
            raise ModelError(
                f"the model's weights are {str(half.pop()).removeprefix('torch.')}, in which steps get lost: train it "
                "in float32, model.float(), and convert run.model afterwards"
            )
        try:
            with refuses_autocast(self.task.model):
                f = self.task.predict(self.task.like, x)
        except ModelError:
            raise
        except Exception as error:  # whatever a user's model raises
            reason = str(error).split("\n")[0]
            if x.is_floating_point() and "indices" in reason:  # an embedding's
                reason += "; tokens are whole numbers: say so with from_clients(..., tokens=True)"
            reason += flat_hint(x.shape[1:], reason)
            raise ModelError(f"the model fails on inputs of shape {list(x.shape[1:])} as a tensor: {reason}") from error
        if tuple(f.shape) != (len(x), self.data.output_dim):
            raise ModelError(
                f"the model maps {len(x)} samples to {list(f.shape)}; the data need [{len(x)}, {self.data.output_dim}] "
                f"(by the largest label, or the targets' width){self._whole_targets()}"
            )
        if not bool(self.task.like.isfinite().all()):
            raise NumericalError("the model's weights are not finite before training")
