"""Run folders, comparisons, recordings, exports and reports: files of ours that came back changed."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from ntkfl.compare.plan import planned_cells, read_plan, write_plan
from ntkfl.compare.search import Chosen
from ntkfl.compare.spec import Comparison
from ntkfl.compare.trials import Cell
from ntkfl.federation.build import spelled_out
from ntkfl.federation.config import RunConfig
from ntkfl.federation.export import export, load_exported
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.flower.client_memory import ClientMemory
from ntkfl.report.insight import insight
from ntkfl.report.page import render
from ntkfl.report.runs import find
from ntkfl.report.thin import thin
from ntkfl.report.view import audit, view
from tests.fuzz.target import Target
from tests.fuzz.targets.texts import TOML_WORDS
from tests.fuzz.targets.twists import twisted_json, twisted_toml

_JSON_WORDS = (
    b'"round": 1', b'"test_accuracy": ', b"null", b"NaN", b"{}", b"[]", b'"uplink": {"upload": 1}', b'"\\ud800"', b"\n",
    b'"cells"', b'"folder": "../.."', b'"folder": "\\u0000"', b'"clients": [3]', b'"stop_at": 0.5',
    b'"exchanges"', b"1e999",
)  # fmt: skip
_SETTINGS = {
    "rounds": 2,
    "clients_per_round": 2,
    "data": {"dataset": "digits", "clients": 4, "alpha": 1.0},
    "model": {"hidden": (3,)},
}


def targets(scratch: Path) -> list[Target]:
    run = scratch / "run"
    config = RunConfig(**_SETTINGS, method={"name": "ntk-fl", "steps": [5.0, 50.0]})  # type: ignore[arg-type]
    execute(config, out=run)
    (run / "audit").mkdir()
    (run / "audit" / "findings.json").write_text(json.dumps({"findings": [{"attack": "labels", "leaked": 0.5}]}))
    insight(find([run])[0][0])
    return [*_run_files(scratch, run), *_comparison(scratch, run), *_tensors(scratch, run)]


def _changed(path: Path, read: Callable[[], object]) -> Callable[[bytes], None]:
    whole = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read()
        finally:
            path.write_bytes(whole)

    return check


def _show(run: Path) -> None:
    """What reports and `ntkfl watch` do: a broken file is said on the page, and never breaks the page."""
    found, targets = find([run])
    for one in found:
        shown = thin(view(one), 100)
        document = {"title": "t", "runs": [shown], "targets": targets, "details": {one.id: {"audit": audit(one)}}}
        assert render(document).encode()
        assert json.dumps(shown, allow_nan=False).encode()


def _run_files(scratch: Path, run: Path) -> list[Target]:
    folder = RunFolder(run)
    expected = folder.load_checkpoint()

    def target(
        name: str, read: Callable[[], object], words: tuple[bytes, ...] = _JSON_WORDS, share: float = 1.0
    ) -> Target:
        path = run / name
        twist = {".toml": twisted_toml, ".safetensors": None}.get(path.suffix, twisted_json)
        return Target(f"run {name}", (path.read_bytes(),), _changed(path, read), None, twist, words, share)

    def configuration() -> None:
        _show(run)
        folder.config()
        read = RunConfig.read(run / "config.toml")
        folder.check_config(spelled_out(read) | {"shape": folder.config().get("shape")})

    def history() -> None:
        _show(run)
        cell = Cell("cell", RunConfig(**_SETTINGS), scratch)  # type: ignore[arg-type]
        records = folder.records()
        json.dumps(records, allow_nan=False)
        assert all(isinstance(record, dict) for record in records)
        assert isinstance(cell.failed, str)

    def checkpoint() -> None:
        round, tensors = folder.load_checkpoint()
        assert round == expected[0]
        assert tensors.keys() == expected[1].keys()
        assert all(t.equal(expected[1][name]) for name, t in tensors.items())

    def details() -> None:
        found = insight(find([run])[0][0], keep=False)
        json.dumps(found)

    return [
        target("config.toml", configuration, TOML_WORDS, 0.5),
        target("history.jsonl", history, share=0.5),
        target("timings.jsonl", history, share=0.5),
        target("checkpoint/state.safetensors", checkpoint),
        target("audit/findings.json", lambda: _show(run), share=0.3),
        target("insight.json", details, share=0.02),
    ]


def _comparison(scratch: Path, run: Path) -> list[Target]:
    folder = scratch / "comparison"
    comparison = Comparison(name="c", methods=[{"label": "NTK-FL", "method": {"name": "ntk-fl"}}])  # type: ignore[list-item]
    cells = [c for own in planned_cells(comparison, {"NTK-FL": Chosen({})}, folder / "cells").values() for c in own]
    write_plan(folder, comparison, cells)
    shutil.copytree(run, cells[0].folder.path)

    def plan() -> None:
        assert read_plan(folder) is not None
        _show(folder)

    path = folder / "plan.json"
    return [Target("comparison plan.json", (path.read_bytes(),), _changed(path, plan), None, twisted_json, _JSON_WORDS)]


def _tensors(scratch: Path, run: Path) -> list[Target]:
    """Weights that somebody else hands over, and a client's memory: files of tensors."""
    out = scratch / "exported"
    export(run, out, {})
    memory = ClientMemory(scratch / "memory")
    memory.keep(1, RunFolder(run).load_checkpoint()[1])

    def exported() -> None:
        load_exported(out)

    def header(data: bytes) -> bytes:
        """With the length of the header made right, so that changes in its text get further."""
        end = data.find(b"}}", 8)
        return struct.pack("<Q", end + 2 - 8) + data[8:] if end > 0 else data

    model, described, kept = out / "model.safetensors", out / "export.toml", scratch / "memory" / "1.safetensors"
    words = (b"F32", b"BF16", b"F8_E8M0", b"I64", b'"shape":[', b"data_offsets", b"__metadata__", b"[0,4]")
    return [
        Target("exported weights", (model.read_bytes(),), _changed(model, exported), words=words),
        Target(
            "exported weights headed", (model.read_bytes(),), _changed(model, exported), header, words=words, share=0.5
        ),
        Target(
            "export.toml", (described.read_bytes(),), _changed(described, exported), None, twisted_toml, TOML_WORDS, 0.5
        ),
        Target("client memory", (kept.read_bytes(),), _changed(kept, lambda: memory.before(2)), header, words=words),
    ]
