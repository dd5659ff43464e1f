"""A run as Python has it: finished by `train`, or loaded from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ntkfl.data.moments import Standardization
from ntkfl.data.own import Array, TorchData, read_source
from ntkfl.errors import DataError, ModelError, NTKFLError, RunFolderError, TrustError
from ntkfl.federation.config import ModelConfig, build_method, build_network, method_code
from ntkfl.federation.run_folder import MODEL, Record, RunFolder
from ntkfl.federation.server import Score, ServerState, failure
from ntkfl.methods import Method, State, Task
from ntkfl.privacy.projection import RunSecret
from ntkfl.privacy.settings import Privacy
from ntkfl.progress import percent, plural
from ntkfl.tangent.parameters import eager, flatten
from ntkfl.user_code import refuse_code


class Run:
    """A training run. `history` has one record per round, `timings` how long each took, `config` the settings.

    `checkpoint` is what the next round would start from. `method` is needed where the settings cannot rebuild it, as
    with a loss that was given as an object.
    """

    def __init__(
        self,
        model: nn.Module | None,
        history: list[Record],
        timings: list[Record],
        config: Mapping[str, Any],
        checkpoint: State,
        method: Method | None = None,
    ) -> None:
        self._model, self._method = model, method
        self.history, self.timings, self.config, self.checkpoint = history, timings, config, checkpoint

    @property
    def model(self) -> nn.Module:
        """The trained network: with averaged weights, where the method averages."""
        if self._model is None:
            raise ModelError(
                "this run was made from Python, and its network has no name to build it by: "
                "load the run with model=, a network of the same architecture"
            )
        return self._model

    @property
    def method(self) -> Method:
        """The method, with all its options."""
        if self._method is None:
            self._method = build_method(self.config["method"])
        return self._method

    @property
    def privacy(self) -> Privacy:
        """What clients did to hide."""
        return Privacy(**self.config.get("privacy", {}))

    @property
    def standardization(self) -> Standardization | None:
        """Mean and deviation that inputs were standardised by, where they were."""
        kept, data = self.config.get("standardization"), self.config.get("data")
        if kept is None and not (isinstance(data, Mapping) and data.get("standardize")):
            return None
        if not isinstance(kept, Mapping):
            raise RunFolderError("a run on standardised inputs keeps their mean and std; its config.toml has none")
        return Standardization(**kept)

    @property
    def failure(self) -> str:
        """Why the model is worth nothing, where it ended worse than a constant prediction; else empty."""
        return failure(self.history, self.config.get("constant"))

    def __repr__(self) -> str:
        """One line: the history has a record per round, and each lists clients."""
        last = self.history[-1] if self.history else {}
        found = [plural(len(self.history), "round")]
        if (accuracy := last.get("test_accuracy")) is not None:
            found.append(f"test accuracy {percent(accuracy)}")
        if (loss := last.get("test_loss")) is not None:
            found.append(f"test loss {loss:.4f}")
        if "epsilon" in last:
            found.append(f"ε = {last['epsilon']:.3g} at δ = {last['delta']:.0e} for a {last['unit']}")
        return f"Run({self.config['method']['name']}: {', '.join(found)})"

    def evaluate(self, x: Array | TorchData, y: Array | None = None, *, tokens: bool = False) -> Score:
        """Accuracy and mean loss of the model on samples x [n, ...], y, or on a torch Dataset or DataLoader alone.

        x, y and `tokens` are as for `ntkfl.data.from_clients`; inputs are as for `predict`. Real-valued targets have no
        accuracy.
        """
        source = (x, y) if y is not None else x
        inputs, labels = read_source("x and y" if y is not None else "x", source, tokens)  # type: ignore[arg-type]
        outputs = self.predict(inputs)
        task = Task(self.model, self.config["shape"]["outputs"], self.method.loss)
        labels = labels.to(outputs.device, outputs.dtype if labels.is_floating_point() else labels.dtype)
        return Score.of(task, outputs, labels)

    def predict(self, x: Tensor) -> Tensor:
        """The model's outputs [n, d2] for inputs x [n, ...] as the data have them.

        Where the run's inputs were standardised, so are these, by the run's mean and deviation. Where inputs were
        projected, so are these, if the run is a simulation: another run's projection is secret.
        """
        like = flatten(self.model)
        inputs = x.to(like.dtype) if x.is_floating_point() else x
        shape = self.config["shape"]
        expected = list(shape["inputs"])
        if list(inputs.shape[1:]) != expected:
            raise DataError(f"x has inputs of shape {list(inputs.shape[1:])}; the run's have {expected}")
        if (standardization := self.standardization) is not None:
            inputs = standardization.standardize(inputs)
        if self.privacy.projected_dim is not None:
            secret = RunSecret.simulated(self.config["seed"])
            if not self.config.get("simulation") or shape.get("key_id") != secret.key_id:
                raise TrustError("the run's projection is secret: only its clients can project inputs")
            projection = self.privacy.make_projection(secret, shape["inputs"])
            assert projection is not None
            inputs = projection(inputs)
        return Task(self.model, shape["outputs"], self.method.loss).predict(like, inputs.to(like.device))

    @staticmethod
    def load(path: Path | str, model: nn.Module | None = None, *, allow_code: bool = False) -> Run:
        """The run in a folder, as far as it has come.

        The network is rebuilt from the settings, or `model` gets the weights: one of the same architecture, needed
        where the run was made from Python. Settings may name code of their author's, such as a model factory: it is
        imported and called only with `allow_code`.
        """
        folder = RunFolder(path)
        config = folder.config()
        history, timings = folder.records(), folder.records("timings.jsonl")
        done, checkpoint = folder.load_checkpoint()
        run = Run(model, history[:done], timings[:done], config, checkpoint)
        try:
            rebuilt = ModelConfig(**config["model"]) if model is None and "name" in config["model"] else None
            named = [*method_code(config["method"]), *(rebuilt.code if rebuilt else [])]
            refuse_code([] if allow_code else named, str(folder.path / "config.toml"))
            if rebuilt:
                shape = config["shape"]
                built = build_network(rebuilt, run.privacy.model_input_shape(shape["inputs"]), shape["outputs"], 0)
                run._model, run._method = built.to(getattr(torch, shape["precision"])), build_method(config["method"])
        except TrustError:
            raise
        except (NTKFLError, KeyError, TypeError, AttributeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise RunFolderError(f"{folder.path / 'config.toml'} cannot be read: {why}") from None
        if run._model is not None:
            _load_weights(folder, run)
        return run


def _load_weights(folder: RunFolder, run: Run) -> None:
    """Of the finished run, or of its last whole round."""
    try:
        with eager(run.model) as model:
            if (folder.path / MODEL).exists():
                model.load_state_dict(folder.load_model())
            elif run.checkpoint:
                server = ServerState(Task(model, run.config["shape"]["outputs"], run.method.loss), run.method)
                server.restore(run.checkpoint)
                model.load_state_dict(server.trained(model).state_dict())
    except RuntimeError as error:  # torch says on its first line which class it is, and on its second what is wrong
        why = " ".join(str(error).splitlines()[:2][-1].split())
        raise ModelError(f"the weights in {folder.path} do not fit the network: {why}") from None
