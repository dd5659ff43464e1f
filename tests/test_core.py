"""The core stands without its extras."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ntkfl
from ntkfl.extras import install_command

PROGRAM = """
import importlib, json, sys
hidden, modules, lines = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(hidden))
for name in modules:
    importlib.import_module(name)
from ntkfl.cli import main
for line in lines:
    sys.argv = ["ntkfl", *line.split()]
    try:
        main()
    except SystemExit as end:
        print(f"{line.split()[0]} ended with {end.code}", flush=True)
"""
TRAIN = "train --dataset digits --clients 8 --clients-per-round 3 --rounds 1 --method cp-ntk-fl --set hidden=[8]"
TRAIN += " --set projected_dim=20 --out "


def without(hidden: Sequence[str], modules: Sequence[str], lines: Sequence[str], folder: Path) -> tuple[list[str], str]:
    """How these commands end where `hidden` cannot be imported and `modules` were; and all that was said of errors."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([hidden, modules, lines])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stdout.splitlines() if " ended with " in line], done.stderr


def test_everything_but_flower_works_without_it(tmp_path: Path) -> None:
    """Key server and shuffler too: every other module is imported, a shuffled round trains, a report is written."""
    found = (module.name for module in pkgutil.walk_packages(ntkfl.__path__, "ntkfl.", onerror=lambda name: None))
    modules = [name for name in found if not name.startswith(("ntkfl.__main__", "ntkfl.flower"))]
    ends, said = without(["flwr"], modules, [TRAIN + "run", "report run"], tmp_path)
    assert ends == ["train ended with 0", "report ended with 0"], said
    assert (tmp_path / "run" / "report.html").exists()


def test_everything_but_sealing_works_without_the_services_extra(tmp_path: Path) -> None:
    hidden = ["cryptography", "starlette", "uvicorn", "httpx"]
    ends, said = without(hidden, [], [TRAIN + "run --set shuffle=false", TRAIN + "shuffled"], tmp_path)
    assert ends == ["train ended with 0", "train ended with 2"], said
    assert install_command("services") in said


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
