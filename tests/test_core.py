"""The core stands without its extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ntkfl.extras import install_command

PROGRAM = """
import sys
for name in ("cryptography", "starlette", "uvicorn", "httpx"):
    sys.modules[name] = None
import torch, ntkfl
from ntkfl.errors import ConfigError
import ntkfl.cli
fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=8, alpha=1.0), seed=0)
method, how = ntkfl.methods.CPNTKFL(), {"rounds": 1, "clients_per_round": 3}
for shuffle in (False, True):
  privacy = ntkfl.methods.Privacy(projected_dim=20, shuffle=shuffle)
  try:
    run = ntkfl.train(ntkfl.models.mlp(20, 8, 10), fed, method, **how, privacy=privacy)
    print(run.history[0]["test_accuracy"])
  except ConfigError as error:
    print(error)
"""


WITHOUT_FLOWER = """
import sys
sys.modules["flwr"] = None
import importlib, pkgutil
import ntkfl
from ntkfl.cli import main
for found in pkgutil.walk_packages(ntkfl.__path__, "ntkfl.", onerror=lambda name: None):
    if not found.name.startswith(("ntkfl.__main__", "ntkfl.flower")):
        importlib.import_module(found.name)
for line in ("train --dataset digits --clients 8 --clients-per-round 3 --method cp-ntk-fl "
             "--set projected_dim=20 --set hidden=[8] --rounds 1 --out run", "report run"):
    sys.argv = ["ntkfl", *line.split()]
    try:
        main()
    except SystemExit as end:
        print(f"{line.split()[0]} ended with {end.code}", flush=True)
"""


def test_everything_but_flower_works_without_it(tmp_path: Path) -> None:
    """Key server and shuffler too: every other module is imported, a shuffled round trains, a report is written."""
    command = [sys.executable, "-c", WITHOUT_FLOWER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    ends = [line for line in done.stdout.splitlines() if " ended with " in line]
    assert ends == ["train ended with 0", "report ended with 0"], done.stdout + done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    assert "Traceback" not in done.stderr


def test_everything_but_sealing_works_without_the_services_extra() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    accuracy, refusal = done.stdout.splitlines()
    assert 0 <= float(accuracy) <= 1
    assert install_command("services") in refusal


def test_training_on_digits_imports_only_what_a_round_needs(tmp_path: Path) -> None:
    """sympy, scikit-learn or torch's compiler take a fifth of a second to a second, every time a command starts."""
    program = (
        "import sys; from ntkfl.cli import main; sys.argv = ['ntkfl', *sys.argv[1:]]\n"
        "try: main()\nfinally: print(*sorted({name.split('.')[0] for name in sys.modules}), "
        "*(name for name in sys.modules if name == 'torch._dynamo'))"
    )
    line = "train --dataset digits --clients 8 --clients-per-round 2 --set hidden=[4] --rounds 1 --out run"
    command = [sys.executable, "-c", program, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=120)
    loaded = done.stdout.splitlines()[-1].split()
    unneeded = (
        "sympy sklearn scipy torch._dynamo matplotlib PIL pandas packaging cryptography starlette httpx sqlite3 flwr"
    )
    assert not {*unneeded.split()} & {*loaded}
    assert "torch" in loaded
