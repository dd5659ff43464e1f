"""A trained model to hand on: its weights, and its projection sealed to those named and to nobody else.

    model.safetensors      the weights
    export.toml            the network, names of classes and features, mean and deviation of standardised inputs, the
                           projection's kind, and its seed ρ sealed to each recipient
    projection.safetensors the matrix P in plain, only where it was asked for

Whoever holds P can attack every projected row ever recorded, so a model that needs it does not simply bring it.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch
from pydantic import Field
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from ntkfl.atomic import PART, write_atomically, write_private
from ntkfl.crypto.context import Secret, bind
from ntkfl.data.moments import Standardization
from ntkfl.errors import ConfigError, ModelError, RunFolderError, TrustError
from ntkfl.federation.build import build_network
from ntkfl.federation.config import ModelConfig
from ntkfl.federation.run import standardization_in
from ntkfl.federation.run_folder import RunFolder, names_in
from ntkfl.options import NONE, Options
from ntkfl.privacy.projection import Projection, RunSecret, make_projection
from ntkfl.safe_parse import read_toml
from ntkfl.tangent.parameters import eager
from ntkfl.user_code import refuse_code
from ntkfl.version import __version__

_BEGUN = "export.begun"  # in a folder that an export is being written to
WARNING = (
    "the projection is written in plain: whoever reads it can attack every row recorded in this run, "
    "its own and everybody else's"
)


class ProjectionNote(Options):
    """What the projection is, but for its seed."""

    features: int = Field(ge=1)
    kind: str
    federation: str
    run: str
    key_id: str
    sealed: dict[str, str] = Field(default_factory=dict, description="ρ by recipient, base64")


class ExportedNames(Options):
    """What outputs and inputs are called, in order; empty where the run's data had no names. Clients' stay behind."""

    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


class Export(Options):
    """export.toml."""

    ntkfl: str
    inputs: tuple[int, ...]
    outputs: int = Field(ge=1)
    precision: str = Field("float32", pattern="^float(32|64)$")
    model: ModelConfig | None = None
    projection: ProjectionNote | None = None
    standardization: Standardization | None = Field(None, description="of inputs, before any projection")
    names: ExportedNames = ExportedNames()

    @staticmethod
    def read(folder: Path) -> Export:
        return Export(**read_toml(folder / "export.toml"))


class ExportedModel(nn.Module):
    """The network behind its standardisation and its projection: takes inputs as the data have them.

    `class_names` are its outputs', `feature_names` its inputs' (columns of a table), in order; empty where unknown.
    """

    def __init__(
        self,
        network: nn.Module,
        projection: Projection | None,
        standardization: Standardization | None = None,
        names: ExportedNames | None = None,
    ) -> None:
        super().__init__()
        self.network, self.projection, self.standardization = network, projection, standardization
        self.class_names = names.classes if names else ()
        self.feature_names = names.features if names else ()

    def forward(self, x: Tensor) -> Tensor:
        if self.standardization is not None:
            x = self.standardization.standardize(x)
        out: Tensor = self.network(x if self.projection is None else self.projection(x))
        return out


def export(
    run: Path,
    out: Path,
    recipients: Mapping[str, bytes],
    *,
    secret: RunSecret | None = None,
    plain: bool = False,
    on_bytes: Callable[[int, int], None] = lambda count, total: None,
) -> Path:
    """Write the model of a finished run to the new folder `out`; one of an export that was cut short will do.

    `recipients` are public sealing keys by name. `secret` is the run's; a simulation's is derived from its seed.
    `on_bytes(count, total)` hears of `count` more of the weights' bytes that are written.
    """
    folder = RunFolder(run)
    config = folder.config()
    weights = run / "model.safetensors"
    if not weights.exists():
        raise RunFolderError(f"{run} has no model yet: the run has not ended")
    standardization = standardization_in(config)
    content = weights.read_bytes()
    try:
        note, projection = _note(config, content, recipients, secret)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{run / 'config.toml'} does not say what an export needs: {error}") from None
    _clear(out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: choose another folder")
    named = config.get("model", {}).get("name")
    described = Export(
        ntkfl=__version__,
        inputs=config["shape"]["inputs"],
        outputs=config["shape"]["outputs"],
        precision=config["shape"]["precision"],
        model=ModelConfig(**config["model"]) if named else None,
        projection=note,
        standardization=standardization,
        names=ExportedNames(**{kind: names_in(config, kind) for kind in ExportedNames.model_fields}),
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / _BEGUN).touch()
        if plain and projection is not None:
            write_private(out / "projection.safetensors", save_tensors({"matrix": projection.matrix}))
        write_atomically(out / "model.safetensors", content, lambda count: on_bytes(count, len(content)))
        # Last: what can be found is whole.
        write_atomically(
            out / "export.toml", tomli_w.dumps(described.model_dump(mode="json", exclude_none=True)).encode()
        )
        (out / _BEGUN).unlink()
    except OSError as error:
        _clear(out)  # so that the folder can be used again
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    return out


def _clear(out: Path) -> None:
    """Remove what an export left that was killed before its end, known by its mark; nothing of anybody else's."""
    if not (out / _BEGUN).exists():
        return
    if not (out / "export.toml").exists():  # else it is whole, but for the mark
        ours = ("projection.safetensors", "model.safetensors", "export.toml")
        for path in [path for name in ours for path in (*out.glob(name), *out.glob(f"{name}.*{PART}"))]:
            path.unlink()
    (out / _BEGUN).unlink()  # last: killed before, the next one clears the rest


def load_exported(
    folder: Path | str,
    key: Path | str | None = None,
    model: nn.Module | None = None,
    *,
    allow_code: bool = False,
) -> ExportedModel:
    """The exported model, ready to use: inputs [n, …] as the data have them -> outputs [n, d2]. Its `class_names` and
    `feature_names` say what they are, where the run's data did.

    `key` is the recipient's private sealing key, where the model has a projection. `model` is a network of the same
    architecture, for runs made from Python with a network of their own. An export may name code that builds its
    network: with `allow_code` it is imported and called.
    """
    folder = Path(folder)
    described = Export.read(folder)
    try:
        content = (folder / "model.safetensors").read_bytes()
    except OSError as error:
        raise RunFolderError(f"cannot read {folder / 'model.safetensors'}: {error.strerror}") from None
    note = described.projection
    shape = described.inputs if note is None else (note.features,)
    if model is None:
        if described.model is None:
            raise ModelError("this model was made from Python and has no name: give a network like it as model=")
        if described.model.own and not allow_code:
            refuse_code(described.model.code, str(folder / "export.toml"))
        model = build_network(described.model, shape, described.outputs, seed=0).to(getattr(torch, described.precision))
    try:
        with eager(model) as own:
            own.load_state_dict(load_tensors(content))
    except Exception as error:
        raise ModelError(f"the exported weights do not fit the network: {str(error).splitlines()[0]}") from None
    projection = None if note is None else _projection(folder, note, described, content, key)
    return ExportedModel(model.eval(), projection, described.standardization, described.names)


def _note(
    config: Mapping[str, Any], content: bytes, recipients: Mapping[str, bytes], secret: RunSecret | None
) -> tuple[ProjectionNote | None, Projection | None]:
    method, shape = config["method"], config["shape"]
    if method.get("projected_dim") in (None, NONE):
        return None, None
    if secret is None:
        if not config.get("simulation"):
            raise TrustError("the aggregator does not know ρ: export as an enrolled client (--client its folder)")
        secret = RunSecret.simulated(config["seed"])
    named = (config.get("federation"), config.get("run"))
    if named != (None, None) and named != (secret.federation, secret.run):
        raise TrustError(f"this run is {'/'.join(map(str, named))}; the client is of {secret.federation}/{secret.run}")
    if shape.get("key_id") not in (None, secret.key_id):
        raise TrustError(f"this seed is not the one the run was trained with (key id {shape['key_id']})")
    projection = make_projection(secret, shape["inputs"], method["projected_dim"], method["projection"])
    sealed = {}
    if recipients:
        from ntkfl.crypto.hpke import seal  # sealing is an extra

        for name, public in recipients.items():
            text = seal(public, secret.seed.reveal(), _context(secret.federation, secret.run, name, content))
            sealed[name] = base64.b64encode(text).decode()
    note = ProjectionNote(
        features=method["projected_dim"],
        kind=method["projection"],
        federation=secret.federation,
        run=secret.run,
        key_id=secret.key_id,
        sealed=sealed,
    )
    return note, projection


def _projection(
    folder: Path, note: ProjectionNote, described: Export, content: bytes, key: Path | str | None
) -> Projection:
    plain = folder / "projection.safetensors"
    if plain.exists():
        try:
            matrix = load_tensors(plain.read_bytes())["matrix"]
        except Exception as error:
            raise ModelError(f"{plain} holds no projection: {str(error).splitlines()[0]}") from None
        return Projection(matrix, math.prod(described.inputs) ** -0.5 if note.kind == "gaussian" else 1.0)
    if key is None:
        raise TrustError(f"the projection is sealed to {', '.join(note.sealed) or 'nobody'}: give the private key")
    from ntkfl.crypto.hpke import SealingKey

    opener = SealingKey.load(Path(key))
    for name, text in note.sealed.items():
        try:
            seed = opener.open(base64.b64decode(text), _context(note.federation, note.run, name, content))
        except (TrustError, ValueError):
            continue
        secret = RunSecret(Secret(seed), note.federation, note.run)
        return make_projection(secret, described.inputs, note.features, note.kind)
    raise TrustError(f"this key opens none of the seals: they are for {', '.join(note.sealed) or 'nobody'}")


def _context(federation: str, run: str, recipient: str, model: bytes) -> bytes:
    return bind("ntkfl export v1", federation, run, recipient, hashlib.sha256(model).digest())
