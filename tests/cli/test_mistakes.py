"""Common mistakes: each message says what is wrong, where, and what to do, in words of ours.

`python -m tests.cli.test_mistakes` prints all of them, with what was done, as one page to read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

import ntkfl
from ntkfl.cli import main
from ntkfl.errors import NTKFLError

# Words of pydantic, click and Python that say nothing to who made the mistake.
FOREIGN = "Traceback|validation error|nput should|should match pattern|Extra inputs|Field required|pydantic"
MOST_LINES, MOST_CHARACTERS = 3, 300
DIGITS = "--dataset digits --clients 6 --clients-per-round 2 --set hidden=[4]"


class Mistake(NamedTuple):
    """What is done (a command, or lines of Python), parts of what is said, files that its user wrote, the exit code."""

    done: str
    says: tuple[str, ...]
    files: dict[str, str] = {}  # noqa: RUF012 - never changed
    code: int = 2


def toml(text: str) -> dict[str, str]:
    return {"own.toml": text}


def own(text: str) -> dict[str, str]:
    return {"own.py": text}


VISITS = "age,sex,diagnosis,hospital\n61,f,flu,north\n45,m,cold,south\n,f,flu,south\n30,m,cold,north\n"
FILLED = VISITS.replace("\n,", "\n7,")
MINE = "from ntkfl.methods import FedAvg\n\nclass Mine(FedAvg):\n    "
ANSWER = MINE + "def answer(self, task, question, client):\n        "
COMPARE = 'rounds = 1\ndata = {dataset = "digits", clients = 6}\n'
CURVE = '[[methods]]\nlabel = "A"\nmethod = "fedavg"\n'

MISTAKES: dict[str, list[Mistake]] = {
    "On the command line": [
        Mistake("ntkfl trian --dataset digits", ("unknown verb 'trian'", "did you mean 'train'")),
        Mistake("ntkfl keys inti demo", ("'inti'", "did you mean", "'init'", "ntkfl keys --help")),
        Mistake("ntkfl train --datset digits", ("'--datset'", "did you mean", "'--dataset'", "ntkfl train --help")),
        Mistake("ntkfl train --rounds ten", ("'--rounds'", "'ten'", "integer")),
        Mistake("ntkfl train digits", ("unexpected", "digits", "ntkfl train --help")),
        Mistake("ntkfl compare", ("missing argument", "CONFIG", "ntkfl compare --help")),
        Mistake("ntkfl train --dataset fashion-minst", ("unknown dataset", "did you mean 'fashion-mnist'")),
        Mistake("ntkfl data fetch imagenet", ("unknown dataset 'imagenet'", "valid are cifar10, digits")),
        Mistake("ntkfl train --dataset digits --method fedvag", ("unknown method", "did you mean 'fedavg'")),
        Mistake("ntkfl train --dataset digits --partition random", ("unknown partition", "valid are client, di")),
        Mistake(f"ntkfl train {DIGITS} --alpha 0", ("option 'alpha' must be above 0, not 0",)),
        Mistake("ntkfl train --dataset digits --clients 9 --clients-per-round 20", ("from 1 to all 9 clients, not",)),
        Mistake(f"ntkfl train {DIGITS} --set lr", ("--set 'lr' has no value", "--set lr=0.1")),
        Mistake(f"ntkfl train {DIGITS} --method ntk-fl --set kernl=trace", ("'kernl'", "did you mean 'kernel'")),
        Mistake(f"ntkfl train {DIGITS} --method fedavg --set kernel=full",
                ("fedavg has no option 'kernel'", "ntk-fl, cp-ntk-fl")),
        Mistake(f"ntkfl train {DIGITS} --method fedavg --set lr=fast", ("option 'lr' must be a number, not 'fast'",)),
        Mistake(f"ntkfl train {DIGITS} --method fedavg --set local_steps=2.5", ("must be a whole number, not 2.5",)),
        Mistake(f"ntkfl train {DIGITS} --method ntk-fl --set values=float8",
                ("option 'values' must be 'float32' or '8bit', not 'float8'",)),
        Mistake(f"ntkfl train {DIGITS} --method ntk-fl --set choose=validation", ("needs held-out clients",)),
        Mistake(f"ntkfl train {DIGITS} --device gpu", ("no device 'gpu'", "there is cpu")),
        Mistake(f"ntkfl train {DIGITS} --method fedavg --private", ("not fedavg", "add --method private-sums")),
        Mistake(f"ntkfl train {DIGITS} --method ntk-fl --secure-sum", ("ntk-fl", "secure_sum", "leave it out")),
        Mistake(f"ntkfl train {DIGITS} --out runs", ("runs is not empty", "choose another folder")),
        Mistake(f"ntkfl train {DIGITS} --method fedavg --set lr=1e30", ("diverged", "a smaller lr")),
        Mistake("ntkfl new 2-sites", ("'2-sites'", "a letter first")),
    ],
    "In a file of settings": [
        Mistake("ntkfl train --config none.toml", ("no such file: none.toml",)),
        Mistake("ntkfl train --config own.toml", ("own.toml is not valid TOML", "line 1"), toml("rounds = 3,\n")),
        Mistake("ntkfl train --config own.toml", ("own.toml", "'modle'", "did you mean 'model'"), toml("[modle]\n")),
        Mistake("ntkfl train --config own.toml", ("own.toml", "'rounds' must be a whole number, not 'ten'"),
                toml('rounds = "ten"\n')),
        Mistake("ntkfl train --config own.toml", ("own.toml", "'hidden[1]' must be a whole number, not 'wide'"),
                toml('[model]\nhidden = [64, "wide"]\n')),
        Mistake("ntkfl train --config own.toml", ("secure_sum is a setting of [privacy]", "fedavg"),
                toml('[method]\nname = "fedavg"\nsecure_sum = true\n')),
        Mistake("ntkfl train --config own.toml", ("'clients_per_round' for [data]", "valid are alpha"),
                toml("[data]\nclients_per_round = 5\n")),
        Mistake("ntkfl train --config own.toml", ("'method' must be a table, [method] in a file",),
                toml('method = "fedavg"\n')),
        Mistake("ntkfl train --config own.toml", ("'robust' must be a table, [robust] in a file or 'on'",),
                toml("robust = true\n")),
    ],
    "With data of one's own": [
        Mistake("ntkfl train --dataset visits.csv", ("no such file: visits.csv",)),
        Mistake("ntkfl train --dataset visits.csv", ("no column 'label'", "age, sex", "--label-column"),
                {"visits.csv": VISITS}),
        Mistake("ntkfl train --dataset visits.csv --label-column diagnosis --client-column hospital",
                ("column 'age' (row 4 has '')", "pandas.to_numeric", "t.dropna()"), {"visits.csv": VISITS}),
        Mistake("ntkfl train --dataset visits.csv --label-column diagnosis --client-column hospital",
                ("column 'sex' (row 2 has 'f') holds text", "pandas.get_dummies"), {"visits.csv": FILLED}),
        Mistake("ntkfl train --dataset photos", ("photos holds no pictures", "CLIENT/CLASS/FILE"),
                {"photos/north/flu.txt": ""}),
        Mistake("ntkfl train --dataset own:clients", ("'own:clients' must give clients", "from_clients", "not list"),
                own("def clients():\n    return [1, 2]\n")),
        Mistake("ntkfl.data.from_clients([(x, y), (x[:, :3], y)], test=(x, y))", ("client 1 has features [3]", "like")),
        Mistake("ntkfl.data.from_clients([(x, y)], test=(x, y), classes=3)", ("client 0", "0..2, not 0..7", "classes")),
        Mistake("ntkfl.data.from_clients([(x / 0, y)], test=(x, y))", ("client 0: x has a value that", "leave out")),
    ],
    "With a model of one's own": [
        Mistake(f"ntkfl train {DIGITS} --model mpl", ("unknown model 'mpl'", "did you mean 'mlp'")),
        Mistake("ntkfl train --dataset digits --model nets:Net", ("cannot import 'nets'", "this folder")),
        Mistake("ntkfl train --dataset digits --model own:Net", ("'own' has no function 'Net'",),
                own("def net(shape, outputs): ...\n")),
        Mistake("ntkfl train --dataset digits --model own:net", ("'own:net' cannot be built of (input shape, outputs",),
                own("def net(): ...\n")),
        Mistake("ntkfl train --dataset digits --model cnn --set hidden=[4]", ("are of an mlp", "leave them out")),
        Mistake("ntkfl.train(ntkfl.models.mlp(784, 8, 10), fed, ntkfl.methods.FedAvg())", ("inputs, [1, 8, 8] each",)),
        Mistake("ntkfl.train(ntkfl.models.mlp(64, 8, 3), fed, ntkfl.methods.FedAvg())", ("the data need [2, 10]",)),
        Mistake("ntkfl.jacobian(model, x[0])", ("samples x [N]", "one sample is x[:1]")),
    ],
    "With a method": [
        Mistake("ntkfl.train(model, fed, ntkfl.methods.FedAvg)", ("method must be an instance, with brackets",)),
        Mistake("ntkfl.train(model, ntkfl.data.load('digits'), ntkfl.methods.FedAvg())",
                ("must be dealt to clients", "dataset.partition(…)")),
        Mistake("ntkfl.train(model, fed, ntkfl.methods.FedAvg(epochs=3))",
                ("unknown option 'epochs' for FedAvg", "valid are", "local_epochs")),
        Mistake("ntkfl.train(model, fed, ntkfl.methods.SumNTKFL(), privacy={'epsilon': 3})",
                ("privacy must be ntkfl.methods.Privacy(…)",)),
        Mistake(f"ntkfl train {DIGITS} --method own:Mine", ("Mine: option 'strength' needs a type", "strength: float"),
                own(MINE + "strength = 0.5\n")),
        Mistake(f"ntkfl train {DIGITS} --method own:Mine", ("option 'lr' needs a type", "lr: float = …"),
                own(MINE + "lr = 0.5\n")),
        Mistake(f"ntkfl train {DIGITS} --method own:Mine", ("own:Mine is no whole method", "it needs round and answer"),
                own("from ntkfl.methods import Method\n\nclass Mine(Method): ...\n")),
        Mistake(f"ntkfl train {DIGITS} --method own:Mine", ("own:Mine: `round` has no yield", "Outcome"),
                own(MINE + "def round(self, task, state, round, cohort):\n        return state\n")),
        Mistake(f"ntkfl train {DIGITS} --method own:Mine", ("own:Mine: `answer` must return Update.of(…), not {'w",),
                own(ANSWER + "return {'weights': 1}\n")),
        Mistake(f"ntkfl train {DIGITS} --method own:Mine", ("2 malformed ('weights'", "has shape [3], not [310]"),
                own(ANSWER + "from ntkfl.methods.replies import Update\n"
                    "        return Update.of(client, weights=question.arrays['weights'][:3])\n"), 75),
        Mistake(f"ntkfl train {DIGITS} --method own:Mine", ("TypeError", "own.py, line 5, in answer: return None / cl"),
                own(ANSWER + "return None / client\n"), 1),
    ],
    "With runs, comparisons and the audit": [
        Mistake("ntkfl train --resume", ("--resume needs", "add --out FOLDER")),
        Mistake("ntkfl train --resume --out runs/b", ("runs/b holds no run",)),
        Mistake(f"ntkfl train {DIGITS} --out runs/a", ("runs/a already holds a run", "--resume", "choose another")),
        Mistake("ntkfl train --resume --out runs/a --rounds 2 --set lr=0.5", ("method.lr is 0.1 there, 0.5 here",)),
        Mistake("ntkfl report runs/b", ("no such folder: runs/b",)),
        Mistake("ntkfl forget runs/a --client north", ("sum-ridge", "--set keep_shares=true")),
        Mistake("ntkfl compare own.toml", ("own.toml: option 'methods' is missing", "[[methods]]"), toml(COMPARE)),
        Mistake("ntkfl compare own.toml", ("option 'label' is missing for [[methods]]: the curve's name",),
                toml(COMPARE + '[[methods]]\nmethod = "fedavg"\n')),
        Mistake("ntkfl compare own.toml", ("two methods have the label 'A'",), toml(COMPARE + CURVE * 2)),
        Mistake("ntkfl compare own.toml", ("unknown option 'rate' for FedAvg", "valid are average"),
                toml(COMPARE + CURVE + "grid = {rate = [0.1, 1.0]}\n")),
        Mistake("ntkfl compare own.toml", ("unknown option 'round' for a comparison", "did you mean 'rounds'"),
                toml(COMPARE.replace("rounds", "round") + CURVE)),
        Mistake("ntkfl compare own.toml", ("'seeds' must be at least 1 long",), toml("seeds = []\n" + COMPARE + CURVE)),
        Mistake("ntkfl compare own.toml", ("A: a grid needs at least one value",),
                toml(COMPARE + CURVE + "grid = {lr = []}\n")),
        Mistake("ntkfl compare own.toml", ("'grid.lr' must be a list, not 0.1",),
                toml(COMPARE + CURVE + "grid = {lr = 0.1}\n")),
        Mistake("ntkfl compare own.toml", ("'name' must be letters, digits", "not 'my runs'"),
                toml('name = "my runs"\n' + CURVE)),
        Mistake("ntkfl audit", ("the folder of a run", "--config", "--private")),
        Mistake("ntkfl audit runs/a --round 5", ("planned for 1 round", "no round 5")),
    ],
    "At the sites": [
        Mistake("ntkfl keys init new --clients 5 --per-round 6", ("cannot ask 6 clients: there are 5",)),
        Mistake("ntkfl keys init demo --clients 5", ("demo is there already", "give a new folder")),
        Mistake("ntkfl keys revoke demo/key-server client-9", ("no client 'client-9'", "demo/key-server/issued")),
        Mistake("ntkfl serve shuffler runs", ("runs is no role's folder", "ntkfl keys init")),
        Mistake("ntkfl policy show none.toml", ("no policy at none.toml", "ntkfl policy new none.toml")),
        Mistake("ntkfl policy show own.toml", ("own.toml", "did you mean 'sums'"), toml('methods = ["sumz"]\n')),
        Mistake("ntkfl policy show own.toml", ("'shuffler' must be sha256:… of the shuffler's public key",),
                toml('methods = ["sums"]\nshuffler = "abc"\n')),
        Mistake("ntkfl policy show own.toml", ("'epsilon_per_year' is missing for [privacy]", "365 days"),
                toml('methods = ["sums"]\n[privacy]\nepsilon_per_run = 3.0\n')),
        Mistake("ntkfl policy new own.toml", ("own.toml is there already", "choose another name"), toml("")),
    ],
    "In a Flower app": [
        Mistake("ntkfl.flower.Strategy(ntkfl.methods.SumNTKFL, model)", ("an instance, with brackets",)),
        Mistake("ntkfl.flower.Strategy(ntkfl.methods.CPNTKFL(), model)", ("needs a shuffler", "through=…")),
        Mistake("ntkfl.flower.Strategy(ntkfl.methods.FedAvg(), model).start(None, other_arrays)",
                ("initial_arrays does not fit the model", "size mismatch for 1.weight")),
    ],
}  # fmt: skip


@functools.cache
def known() -> dict[str, Any]:
    """What the lines of Python know."""
    fed = ntkfl.data.load("digits").partition(ntkfl.data.IID(clients=6), seed=0)
    names = {"ntkfl": ntkfl, "fed": fed, "model": ntkfl.models.mlp(64, 8, 10)}
    names |= {"x": torch.zeros(8, 5), "y": torch.arange(8)}
    with contextlib.suppress(ImportError):
        from flwr.app import ArrayRecord

        importlib.import_module("ntkfl.flower")
        names["other_arrays"] = ArrayRecord(ntkfl.models.mlp(64, 9, 10).state_dict())
    return names


def prepare(folder: Path) -> Path:
    """The folder with what is there already: a run, and a federation's folders."""
    with contextlib.chdir(folder):
        for words in (f"train {DIGITS} --method fedavg --rounds 1 --out runs/a", "keys init demo --clients 3"):
            assert said(f"ntkfl {words}") == ("", 0)
    return folder


def said(done: str) -> tuple[str, int]:
    """What is said of it on standard error, or by the exception, and the exit code."""
    if not done.startswith("ntkfl "):
        try:
            exec(done, dict(known()))
        except NTKFLError as error:
            return f"{type(error).__name__}: {error}", error.exit_code
        return "", 0
    err = io.StringIO()
    streams = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err)
    with patch.object(sys, "argv", shlex.split(done)), patch.dict(os.environ, NO_COLOR="1"), streams[0], streams[1]:
        try:
            main()
        except SystemExit as leaving:
            text = err.getvalue()
            return text[max(0, text.find("ntkfl: ")) :].strip(), int(leaving.code or 0)
    return "", 0


def made(mistake: Mistake, folder: Path) -> tuple[str, int]:
    """What is said when the mistake is made in this folder, which has its user's files in it meanwhile."""
    with contextlib.chdir(folder), patch.object(sys, "path", [str(folder), *sys.path]):
        for name, text in mistake.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        sys.modules.pop("own", None)
        importlib.invalidate_caches()
        before = content(folder)
        try:
            outcome = said(mistake.done)
            assert content(folder) == before, "something was left behind, or changed"
        finally:
            for name in mistake.files:
                path = Path(name)
                path.unlink() if path.parent == Path() else shutil.rmtree(path.parts[0])
    return outcome


def content(folder: Path) -> dict[str, bytes]:
    """All files and folders below a folder, but for what Python compiles."""
    found = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("mistakes"))


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, id=one.done.replace("ntkfl ", "")) for part in MISTAKES.values() for one in part]
)
def test_a_mistake_is_told_with_what_is_wrong_and_what_to_do(mistake: Mistake, folder: Path) -> None:
    if ".flower" in mistake.done:
        pytest.importorskip("flwr", reason="needs the extra flower")
    text, code = made(mistake, folder)
    assert code == mistake.code
    for part in mistake.says:
        assert part in text
    lines = text.splitlines()
    assert 1 <= len(lines) <= MOST_LINES
    assert all(len(line) <= MOST_CHARACTERS for line in lines)
    assert not re.search(FOREIGN, text)


def page(folder: Path) -> str:
    """All mistakes and what is said of them, in Markdown."""
    parts = ["# Common mistakes, and what is said of them"]
    for heading, mistakes in MISTAKES.items():
        parts.append(f"## {heading}")
        for mistake in mistakes:
            files = "".join(f"\n\n# {name}\n{text.rstrip()}" for name, text in mistake.files.items())
            text, code = made(mistake, folder)
            parts += [f"```\n{mistake.done}{files}\n```", "\n".join(f"> {line}" for line in text.splitlines())]
            parts += [f"Exit code {code}."] if mistake.done.startswith("ntkfl ") else []
    return "\n\n".join(parts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(page(prepare(Path(temporary))))
