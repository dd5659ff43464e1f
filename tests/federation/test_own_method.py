"""A user's own method, `package.module:Class`: on the command line, compared, resumed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import ntkfl
from ntkfl.cli import app
from ntkfl.errors import ConfigError
from ntkfl.federation.config import build_method
from ntkfl.methods import FedAvg

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example, and the method that docs/methods.md prints, where a user would have them: in the working folder."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/methods.md").read_text(), re.S | re.M)
    (printed,) = (block for block in blocks if "class FedSGD(" in block)
    (tmp_path / "fedsgd.py").write_text(printed)
    (tmp_path / "own_method.py").write_bytes((ROOT / "examples/own_method.py").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("fedsgd", "own_method"):
        sys.modules.pop(name, None)


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:Method", "cannot import 'no_such_module'"),
        (":Method", "cannot import ''"),
        ("own_method:NoSuch", "no function 'NoSuch'"),
        ("own_method:Message", "is no method"),
        ("torch:zeros", "is no method"),
        ("own_method:Method", "abstract"),
        ("sign-sgd", "valid are .*package.module:Class"),
    ],
)
def test_what_is_no_method_is_refused_in_one_line(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        build_method({"name": name})
    assert "\n" not in str(refused.value)


_YIELDS = "yield Message('weights', round, dict(state)); "
WRONG = {
    "NoYield": ("round", "return Outcome(state, None)", "`round` has no yield"),
    "NoOutcome": ("round", _YIELDS, r"must return an Outcome\(.*\), not None"),
    "NoWeights": ("round", f"{_YIELDS}return Outcome({{}}, None)", "found none"),
    "Shape": ("round", f"{_YIELDS}return Outcome({{'weights': state['weights'][:5]}}, None)", r"\[310\], found \[5\]"),
    "Many": (
        "answer",
        "return [super().answer(task, question, client)]",
        r"must return Gradient\.of\(…\), not \[Gradient",
    ),
    "Nothing": ("answer", "pass", r"must return Gradient\.of\(…\), not None"),
    "Number": ("answer", "return Gradient({'gradient': 1.0})", "'gradient' in a reply must be a tensor, not 1.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_contract_is_said(name: str, tmp_path: Path) -> None:
    """By the method's name, and never as an error deep in the library, or as clients lost without a word."""
    hook, body, why = WRONG[name]
    arguments = {"round": "self, task, state, round, cohort", "answer": "self, task, question, client"}[hook]
    source = "from ntkfl.methods import Outcome\nfrom ntkfl.wire import Message\nfrom fedsgd import FedSGD, Gradient\n"
    source += f"class {name}(FedSGD):\n    def {hook}({arguments}):\n        {body}\n"
    (tmp_path / f"wrong_{name}.py").write_text(source)
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=3), seed=0)
    method = build_method({"name": f"wrong_{name}:{name}"})
    with pytest.raises(ConfigError, match=why) as refused:
        ntkfl.train(ntkfl.models.mlp(64, 4, 10), fed, method, rounds=1, callbacks=[])
    assert f"wrong_{name}:{name}" in str(refused.value)


def trained(method: ntkfl.methods.Method) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after a round of all of three clients, in float64."""
    torch.manual_seed(0)
    model = ntkfl.models.mlp(64, 4, 10).double()
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=3), seed=0)
    run = ntkfl.train(model, fed, method, rounds=1, clients_per_round=3)
    ends = (torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, run.model))
    return next(ends), next(ends)


def test_the_smallest_method_is_the_equation_printed_above_it() -> None:
    """w − lr · (the clients' mean gradient): FedAvg's round where clients take one step on all they have."""
    w, own = trained(build_method({"name": "fedsgd:FedSGD", "lr": 0.3}))
    averaged = FedAvg(lr=0.3, local_steps=1, batch_size=10_000)
    torch.testing.assert_close(own, trained(averaged)[1], rtol=1e-9, atol=1e-12)
    assert (own - w).norm() > 1e-3


def test_what_torch_draws_in_it_follows_from_the_seed(tmp_path: Path) -> None:
    """On both sides of a round, whole or resumed; outside of a run torch's generator goes on as if there were none."""
    source = "import torch\nfrom fedsgd import FedSGD\n\n\nclass Drawn(FedSGD):\n"
    source += "    def start(self, task, weights):\n        return {'weights': weights + torch.rand_like(weights)}\n\n"
    source += "    def round(self, *a):\n        outcome = yield from super().round(*a)\n"
    source += "        outcome.diagnostics['server'] = float(torch.rand(()))\n        return outcome\n\n"
    source += "    def answer(self, task, question, client):\n"
    source += "        client.x = client.x + torch.randn(client.x.shape)\n"
    (tmp_path / "drawn.py").write_text(source + "        return super().answer(task, question, client)\n")
    small = ["--dataset", "digits", "--clients", "6", "--clients-per-round", "3", "--set", "hidden=[8]"]
    given = ["train", "--method", "drawn:Drawn", *small]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    run(*given, "--rounds", "3", "--out", tmp_path / "whole")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    run(*given, "--rounds", "2", "--out", tmp_path / "parts")
    torch.manual_seed(3)
    run("train", "--resume", "--rounds", "3", "--out", tmp_path / "parts", "--allow-code")
    run(*given, "--rounds", "3", "--seed", "1", "--out", tmp_path / "other")
    whole, parts, other = (tmp_path / name / "history.jsonl" for name in ("whole", "parts", "other"))
    assert whole.read_text() == parts.read_text()
    weights = [load_file(path.with_name("model.safetensors")) for path in (whole, parts)]
    assert all(torch.equal(t, weights[1][name]) for name, t in weights[0].items())
    drawn = [[json.loads(line)["server"] for line in path.read_text().splitlines()] for path in (whole, other)]
    assert len({*drawn[0], *drawn[1]}) == 6  # other numbers in each round, and with another seed
