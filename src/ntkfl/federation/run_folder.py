"""A run's folder: enough to resume, report or repeat the run exactly, and never half-written.

    config.toml        what was run            history.jsonl   one record a round: the same for the same config
    timings.jsonl      what varies             model.safetensors   the weights to use
    checkpoint/state.safetensors   what the next round starts from
    attempts.jsonl     where noise is drawn anew: every round that began, those that failed among them

A file is written beside its place and moved there whole; a history line comes before the checkpoint that counts it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import tomli_w
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ntkfl.atomic import PART, write_atomically
from ntkfl.errors import RunFolderError
from ntkfl.safe_parse import open_unlinked, parse_json, parse_toml, read_unlinked

Record = dict[str, Any]
_CHECKPOINT, MODEL = "checkpoint/state.safetensors", "model.safetensors"
_NUMBERS = frozenset({"round", "test_accuracy", "last_accuracy", "validation_accuracy", "uplink_bytes", "seconds"})
_COUNTS = frozenset({"uplink", "downlink"})
_MAY_DIFFER = ("rounds", "stop_at", "promises", "standardization", "constant", "names")  # in a run that is resumed


class RunFolder:
    """Reading and writing one run's folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here: its settings are the first thing written."""
        return (self.path / "config.toml").exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: a second process that wants it is refused."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open(self.path / ".lock", "w")  # noqa: SIM115 - held open for as long as the lock
        except OSError as error:
            raise RunFolderError(f"cannot use {self.path} as a run folder: {error.strerror}") from None
        with handle:
            for _ in range(20):  # somebody who only looks (`in_use`) holds it for an instant
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    time.sleep(0.01)
            else:
                raise RunFolderError(f"{self.path} is in use by another process: wait for it, or choose another")
            yield

    @property
    def in_use(self) -> bool:
        """Whether a process is at work here. The system drops the lock of one that dies, however it dies."""
        try:
            with open_unlinked(self.path / ".lock") as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def open(self, config: Mapping[str, Any], resume: bool) -> tuple[list[Record], list[Record], dict[str, Tensor]]:
        """Begin a run here, or continue the one there is: its history and timings so far, and its checkpoint.

        The caller holds the lock, so what a killed process left half written is removed. Another run's folder, or one
        that holds anything else, is left alone.
        """
        for left in [*self.path.glob(f"*{PART}"), *self.path.glob(f"checkpoint/*{PART}")]:
            left.unlink(missing_ok=True)
        done, tensors, resumed = 0, dict[str, Tensor](), self.holds_run
        if resumed:
            if not resume:
                how = "continue it with --resume (in Python resume=True), or choose another"
                raise RunFolderError(f"{self.path} already holds a run: {how}")
            self._check_config(config)
            done, tensors = self.load_checkpoint()
            if config["rounds"] < done:
                asked = f"more than the {config['rounds']} asked for"
                raise RunFolderError(f"{self.path} already holds {done} rounds, {asked}")
        elif others := [p.name for p in self.path.glob("*") if p.name != ".lock"]:
            (self.path / ".lock").unlink()  # the folder is somebody else's: it stays as it was
            raise RunFolderError(f"{self.path} is not empty and holds no run ({others[0]} …): choose another folder")
        self.write("config.toml", tomli_w.dumps(_plain(config)).encode())  # rounds may have been raised
        if not resumed:
            return [], [], tensors
        history, timings = (self.write_records(n, self.records(n)[:done]) for n in ("history.jsonl", "timings.jsonl"))
        return history, timings, tensors

    def config(self) -> dict[str, Any]:
        """The settings of the run; `RunFolderError` if they are missing or cannot be read."""
        if not self.holds_run:
            raise RunFolderError(f"{self.path} holds no run: there is no config.toml in it")
        try:
            return parse_toml(read_unlinked(self.path / "config.toml").decode())
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path / 'config.toml'} is broken: {error}") from None

    def _check_config(self, config: Mapping[str, Any]) -> None:
        """Refuse to continue a run under other settings; more rounds are welcome."""
        there = self.config()
        difference = _difference(there, _plain(config), ignore=(*_MAY_DIFFER, "fingerprint"))
        if not difference and names_in(there, "features") != names_in(config, "features"):
            difference = "the data's features, or their order, differ"
        if not difference and there.get("fingerprint") != config.get("fingerprint"):
            difference = "the data are not those that its rounds were trained on"
        if difference.startswith("model.start "):
            difference = "the model's initial weights differ (make the model as at first, from the same seed)"
        if difference:
            error = RunFolderError(f"{self.path} holds a run of another configuration: {difference}")
            if names := names_in(there, "features") if "features" in difference else []:
                error.add_note(
                    f"  t = pandas.read_csv('FILE.csv'); names = {names!r}\n"
                    "  t[names + [name for name in t if name not in names]].to_csv('FILE.csv', index=False)"
                )
            raise error

    @property
    def diverged(self) -> str:
        """Why the run cannot go on, where training ended without finite numbers; empty where it did not."""
        try:
            return read_unlinked(self.path / "failed.txt").decode(errors="replace").strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise RunFolderError(f"{self.path / 'failed.txt'} cannot be read: {error.strerror}") from None

    @property
    def attempts(self) -> int:
        """Rounds that began, whether they succeeded or not, where the run writes them down."""
        return len(self.records("attempts.jsonl"))

    def append(self, name: str, record: Record) -> None:
        """Add one line to history.jsonl or a file like it: it is on the disk when this returns."""
        try:
            with open(self.path / name, "a") as lines:
                lines.write(json.dumps(record, allow_nan=False) + "\n")
                lines.flush()
                os.fsync(lines.fileno())
        except OSError as error:
            raise self._failed(name, error) from None

    def records(self, name: str = "history.jsonl") -> list[Record]:
        """The whole lines of a file; a last line cut short is not counted."""
        path = self.path / name
        try:
            return [_record(line) for line in read_unlinked(path).decode().split("\n")[:-1]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path} is broken: a line in it is no JSON of ours, {error}") from None

    def history(self, rounds: int | None = None, stop_at: float | None = None) -> list[Record]:
        """The first `rounds` records, and none after the first whose test accuracy is `stop_at`."""
        records = self.records()[:rounds]
        if stop_at is None:
            return records
        reached = next((i for i, r in enumerate(records) if (r.get("test_accuracy") or 0) >= stop_at), len(records))
        return records[: reached + 1]

    def write_records(self, name: str, records: list[Record]) -> list[Record]:
        """Put these records in the place of all there are; the records."""
        self.write(name, "".join(json.dumps(r, allow_nan=False) + "\n" for r in records).encode())
        return records

    def save_model(self, tensors: Mapping[str, Tensor]) -> None:
        """The trained model's state dict, as safetensors."""
        copies = {k: v.detach().cpu().clone() for k, v in tensors.items()}  # the format holds tied weights twice
        self.write(MODEL, save_tensors(copies))

    def load_model(self) -> dict[str, Tensor]:
        """The tensors of the finished run's model; `RunFolderError` if they cannot be read."""
        path = self.path / MODEL
        try:
            return load_tensors(path.read_bytes())
        except (OSError, safetensors.SafetensorError) as error:
            why = " ".join(str(error).split())
            raise RunFolderError(f"{path} cannot be read, or the run has not ended: {why}") from None

    def save_checkpoint(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """What the round after `round` starts from, with a checksum over names, types, shapes and bytes."""
        values = {k: v.detach().contiguous().cpu() for k, v in tensors.items()}
        # One entry: the library writes several in no fixed order, and equal states must be equal bytes.
        note = json.dumps({"round": round, "digest": _digest(round, values)})
        self.write(_CHECKPOINT, save_tensors(values, metadata={"ntkfl": note}))

    def load_checkpoint(self) -> tuple[int, dict[str, Tensor]]:
        """(rounds done, tensors); (0, {}) where no round was finished."""
        path = self.path / _CHECKPOINT
        if not path.exists():
            return 0, {}
        try:
            content = path.read_bytes()  # once: the run may be going on, and put another in its place
            tensors = load_tensors(content)
            end = 8 + int.from_bytes(content[:8], "little")  # where the format's header ends, which holds the note
            note = parse_json(parse_json(content[8:end].decode())["__metadata__"]["ntkfl"])
            round, whole = note["round"], note["digest"] == _digest(note["round"], tensors)
        except (safetensors.SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError):
            raise RunFolderError(f"{path} is cut short or damaged: it cannot be resumed from") from None
        if type(round) is not int or not whole:
            raise RunFolderError(f"{path} is damaged: its contents do not match their checksum")
        return round, tensors

    def write(self, name: str, content: bytes) -> None:
        """Atomically: beside its place, flushed to disk, then moved."""
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            raise self._failed(name, error) from None

    def _failed(self, name: str, error: OSError) -> RunFolderError:
        return RunFolderError(f"could not write {self.path / name}: {error.strerror}; what was there before is intact")


def names_in(config: Mapping[str, Any], kind: str) -> list[str]:
    """Of `clients`, `classes` or `features`, as a run's settings keep them; none where it keeps none."""
    kept = config.get("names")
    listed = kept.get(kind) if isinstance(kept, Mapping) else None
    return [str(name) for name in listed] if isinstance(listed, list | tuple) else []


def called(config: Mapping[str, Any], clients: Sequence[int]) -> str:
    """Clients of a run by their names, or numbers where they have none; the first ten."""
    names, shown = names_in(config, "clients"), clients[:10]
    words = [names[i] if isinstance(i, int) and 0 <= i < len(names) else str(i) for i in shown]
    return ", ".join([*words, *(["…"] if len(clients) > len(shown) else [])])


def _record(line: str) -> Record:
    """One line of history.jsonl or timings.jsonl: an object, in which what everybody reads has its type."""
    record = parse_json(line)
    if not isinstance(record, dict):
        raise ValueError("a record is an object")
    for name, value in record.items():
        if name in _NUMBERS and not (value is None or type(value) in (int, float)):
            raise ValueError(f"{name} is a number, not {str(value)[:20]!r}")
        if name in _COUNTS and not (isinstance(value, dict) and all(type(n) is int for n in value.values())):
            raise ValueError(f"{name} has a number for each kind of message")
    return record


def _digest(round: int, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the round and of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(str(round).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)};".encode())
        digest.update(tensors[name].reshape(-1).numpy().data)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Only what TOML can hold: no None, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    return value


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], ignore: tuple[str, ...] = (), at: str = "") -> str:
    """The first setting that differs, in words; empty where none does."""
    for key in sorted({*old, *new} - set(ignore)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            if inner := _difference(a, b, at=f"{at}{key}."):
                return inner
        elif a != b:
            return f"{at}{key} is {'unset' if a is None else a} there, {'unset' if b is None else b} here"
    return ""
