"""A disk that is full: one line, what was there before intact, and on it goes once there is room.

Ordinary users get a file that may not grow (RLIMIT_FSIZE); where mounting is allowed, a disk that really is full.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from ntkfl_experiments.bench.table import write_json

import ntkfl
from ntkfl.atomic import replacing, write_private
from ntkfl.compare.results import summarise, write
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.data.npz import deal
from ntkfl.errors import NTKFLError
from ntkfl.federation.config import RunConfig
from ntkfl.federation.export import export, load_exported
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.report.clients import bubble_plot
from ntkfl.report.page import write_report

TRAIN = [sys.executable, "-m", "ntkfl", "train"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes: what a disk without room does to whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk") / "run"
    config = {"dataset": "digits", "clients": 12}
    execute(RunConfig(rounds=2, clients_per_round=2, data=config, model={"hidden": (8,)}), out=folder)  # type: ignore[arg-type]
    return folder


def test_a_file_that_cannot_be_written_whole_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"), replacing(path) as file:
        file.write(bytes(1000))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_half_a_key_is_no_key(tmp_path: Path) -> None:
    with files_of_at_most(10), pytest.raises(NTKFLError, match=r"cannot write .*key: File too large"):
        write_private(tmp_path / "key", bytes(100))
    assert not (tmp_path / "key").exists()
    write_private(tmp_path / "key", bytes(100))


def test_a_checkpoint_that_does_not_fit_leaves_the_last_one(run: Path) -> None:
    folder = RunFolder(run)
    done, tensors = folder.load_checkpoint()
    with files_of_at_most(500), pytest.raises(NTKFLError, match="File too large; what was there before is intact"):
        folder.save_checkpoint(done + 1, tensors)
    assert folder.load_checkpoint()[0] == done


def _compared(run: Path, out: Path) -> None:
    """A comparison's results and curves, of one method with one run."""
    comparison = Comparison(name="c", methods=[{"label": "a", "method": {"name": "ntk-fl"}}])  # type: ignore[list-item]
    cell = Cell("a", RunConfig.read(run / "config.toml"), out.parent)
    record = {"test_accuracy": 0.5, "last_accuracy": 0.5, "uplink_bytes": 1, "downlink_bytes": 1}
    if not (cell.folder.path).exists():
        cell.folder.path.mkdir()
        for number in (1, 2):
            cell.folder.append("history.jsonl", record | {"round": number})
            cell.folder.append("timings.jsonl", {"round": number, "seconds": 1.0, "device": "cpu"})
    write(out.parent, comparison, [summarise(comparison, "a", comparison.methods[0].method, [cell])], {}, "x" * 1000)


WRITERS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "compare": ("results.json", _compared),
    "report": ("report.html", lambda run, out: write_report([run], out)),
    "bench": ("bench.json", lambda run, out: write_json(out, {"rows": ["x" * 1000]})),
    "plot": ("plot.png", lambda run, out: bubble_plot(np.ones((3, 3), np.int64), out, "title")),
    "deal": ("client-0.npz", lambda run, out: deal(_digits(), out.parent)),
}


def _digits() -> ntkfl.data.Federated:
    return ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=2, alpha=1.0), seed=0)


@pytest.mark.parametrize("what", WRITERS)
def test_nothing_half_written_takes_the_place_of_something_good(what: str, run: Path, tmp_path: Path) -> None:
    name, make = WRITERS[what]
    out = tmp_path / name
    make(run, out)
    good = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with files_of_at_most(600), pytest.raises((NTKFLError, OSError), match="File too large"):
        make(run, out)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == good


def test_an_export_that_did_not_fit_leaves_the_folder_free(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with files_of_at_most(600), pytest.raises(NTKFLError, match=r"cannot write .*File too large"):
        export(run, out, {})
    assert list(out.iterdir()) == []
    export(run, out, {})
    load_exported(out)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run undisturbed, and its settings in settings.toml."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    execute(_settings(12), out=folder)
    (folder / "settings.toml").write_bytes((folder / "config.toml").read_bytes())
    return folder


def _settings(rounds: int) -> RunConfig:
    return RunConfig(
        rounds=rounds,
        clients_per_round=3,
        data={"dataset": "digits", "clients": 12},  # type: ignore[arg-type]
        model={"hidden": (16,)},  # type: ignore[arg-type]
        method={"name": "ntk-fl", "steps": [10.0, 100.0]},
    )


def test_a_training_without_room_says_so_and_goes_on_once_there_is(calm: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    most = (calm / "history.jsonl").stat().st_size // 2
    if (calm / "checkpoint/state.safetensors").stat().st_size < most:  # the history outgrows it half way
        most = max(most, (calm / "checkpoint/state.safetensors").stat().st_size)

    def confined() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    command = [*TRAIN, "--config", calm / "settings.toml", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, preexec_fn=confined)
    _check_refusal(done, "File too large")
    execute(RunConfig.read(out / "config.toml"), out=out, resume=True)
    _same(calm, out)


def test_a_disk_that_is_full(calm: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True, timeout=20
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small disk is not permitted here: {mounted.stderr.strip()}")
    try:
        run = disk / "run"
        execute(_settings(5), out=run)
        good = (run / "checkpoint/state.safetensors").read_bytes()
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            _fill(filler)
        command = [*TRAIN, "--resume", "--rounds", "12", "--out", run]
        _check_refusal(subprocess.run(command, capture_output=True, text=True, timeout=200), "No space left on device")
        assert (run / "checkpoint/state.safetensors").read_bytes() == good
        filler.unlink()
        execute(_settings(12), out=run, resume=True)
        _same(calm, run)
    finally:
        subprocess.run(["umount", disk], check=True, timeout=20)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


def _check_refusal(done: subprocess.CompletedProcess[str], reason: str) -> None:
    assert done.returncode == 2, done.stderr
    line = [line for line in done.stderr.splitlines() if line.startswith("ntkfl: ")]
    assert len(line) == 1, done.stderr
    assert reason in line[0]
    assert "Traceback" not in done.stderr


def _same(calm: Path, other: Path) -> None:
    for name in ("history.jsonl", "model.safetensors", "checkpoint/state.safetensors"):
        assert (calm / name).read_bytes() == (other / name).read_bytes()
    assert json.loads((other / "history.jsonl").read_text().splitlines()[-1])["round"] == 12
