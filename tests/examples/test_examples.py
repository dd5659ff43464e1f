"""Every example runs as it is printed."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from ntkfl.errors import NTKFLError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example writes stays here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "lines", "last", "least"),
    [
        ("quickstart", 10, "round 5", 90),
        ("backbone", 15, "one round", 95),
        ("own_method", 60, "weight", 75),
        ("own_model", 60, "rounds", 60),
    ],
)
def test_it_is_short_and_learns(
    name: str, lines: int, last: str, least: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= lines
    said = run(f"{name}.py", capsys)
    assert float(re.search(rf"{last}: ([\d.]+)%", said)[1]) > least  # type: ignore[index]
    if name == "own_model":
        assert "Jacobian (73, 10, 839)" in said
        assert "% of 355 test samples" in said
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # it leaves nothing behind


def test_hospitals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = run("hospitals.py", capsys)
    together, *alone = (float(a) for a in re.findall(r"(?:round|alone): ([\d.]+)%", said))
    assert len(alone) == 4
    assert together > max(alone)
    assert (tmp_path / "hospitals" / "forgotten.jsonl").exists()


def test_consortium(capsys: pytest.CaptureFixture[str]) -> None:
    """What a run was planned for is its ε; the other cases are all worse."""
    rows = [[float(e) for e in line.split()] for line in run("consortium.py", capsys).splitlines()[1:]]
    assert [row[0] for row in rows] == [1.0, 3.0, 8.0]
    for once, twice, two, five, less in rows:
        assert once < less < twice < two < five
        assert twice < 2 * once  # less than by adding ε up
    module = runpy.run_path(str(EXAMPLES / "consortium.py"))
    try:
        fed = module["hospitals"]()
    except NTKFLError:
        pytest.skip("needs Fashion-MNIST: ntkfl data fetch fashion-mnist")
    assert (fed.sizes, len(fed.test[1])) == ([2000] * 5, 10_000)


def test_own_data(capsys: pytest.CaptureFixture[str]) -> None:
    said = run("own_data.py", capsys)
    assert "as Datasets: True; dealt anew to 8 clients" in said
    accuracy, loss = (json.loads(text) for text in re.findall(r"by round: (\[.*\])", said))
    assert accuracy[-1] > 0.85
    assert loss[-1] < 0.1


def test_own_loss(capsys: pytest.CaptureFixture[str]) -> None:
    squares, huber = (float(error) for error in re.findall(r"mean error ([\d.]+)", run("own_loss.py", capsys)))
    assert huber < 0.5 * squares


def test_compare_methods(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("compare_methods.py", capsys).splitlines()
    last = {line.split()[0]: float(line.split()[-2]) for line in lines[1:-1]}
    assert last["NTK-FL"] > last["FedAvg"]
    assert Path(lines[-1].removeprefix("report: ")).stat().st_size > 50_000


def test_laplace_backend(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("laplace", reason="needs laplace-torch: pip install laplace-torch")
    said = run("laplace_backend.py", capsys)
    assert re.findall(r"^(\w+): (\d+) weights", said, re.MULTILINE) == [("all", "410"), ("last_layer", "370")]
    for rows in re.findall(r"Jacobians differ by (\S+),", said):
        assert float(rows) < 1e-12
    apart = re.findall(r"(?:curvature|predictions|evidence) by (\S+?),?\s", said)
    assert len(apart) == 6
    assert max(float(a) for a in apart) < 1e-6  # its own curvature is a product with a float32 identity
