"""Whatever a decoder or parser is given, it accepts or refuses with an `NTKFLError` of one line: no other error comes
out, no memory or time is spent without bound, and what is accepted is what an honest sender could have meant.

Inputs are made by the real encoders and then changed, in ways that know the format and in ways that do not. Cases
follow from `SEED`; NTKFL_FUZZ_CASES of each target are tried (`make fuzz`: 2,000).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import nn

import ntkfl
from ntkfl.data.files import from_file
from ntkfl.errors import NTKFLError
from ntkfl.federation.config import RunConfig, build_network, spelled_out
from ntkfl.federation.run_folder import RunFolder
from ntkfl.federation.simulation import execute
from ntkfl.methods import ClientRound, Method, Privacy, State, Task
from ntkfl.methods.base import settle
from ntkfl.privacy.randomness import Randomness
from ntkfl.report.page import render
from ntkfl.report.runs import find
from ntkfl.report.view import view
from ntkfl.wire import Message
from ntkfl.wire.jacobians import pack_jacobian, unpack_jacobian
from ntkfl.wire.message import KINDS
from tests.methods.known import METHODS

SEED = 0
CASES = int(os.environ.get("NTKFL_FUZZ_CASES", "80"))
LARGEST = 1 << 17  # bytes of an input: what is found is found with small ones
ROOM = 512 << 20  # bytes that a case may ask for beyond what the process has
CPU_S = 10  # of one case: an honest one takes milliseconds


@dataclass(frozen=True)
class Target:
    """`check` decodes one input: it returns where that was accepted, having asserted what then must hold."""

    name: str
    seeds: Sequence[bytes]  # valid: every one is accepted
    check: Callable[[bytes], object]
    twist: Callable[[Random, bytes], bytes] | None = None  # a change that knows the format
    repair: Callable[[bytes], bytes] = bytes  # makes a checksum or signature fit again, as an attacker would


# -- Changes ---------------------------------------------------------------------------------------------------------

SIZES = (0, 1, 2, 127, 255, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1)
PIECES = (
    b"0", b"-1", b"2147483648", b"9223372036854775808", b"1e400", b"nan", b"Infinity", b"9" * 5000, b"true", b"null",
    b'"x"', b"[]", b"{}", b'"\\ud800"', b"\xff", b"\x00", b"\n", b",", b'"', b"../..", b"[[x]]\n", b"self = 1\n",
    b"(-3, -4)", b"'descr': '|O'", b"1979-05-27T07:32:00Z", b"__metadata__", b"[" * 20_000, b'{"a":' * 20_000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**31, 2**63, 10**400, 1.5, 1e300, float("inf"), float("nan"), "", "x", "../..", "a\0b", [],
    {}, [[]], [-1], ["x"], [1e300], {"self": 1}, {"name": []}, [None, 2],
)  # fmt: skip
NUMBERS = (0.0, -1.0, 1e-45, 3e38, -3e38, float("nan"), float("inf"), 255.0, 2.0**31, 2.0**62)
TYPES = (torch.float32, torch.float64, torch.float16, torch.uint8, torch.int32, torch.int64)


def changed(rng: Random, target: Target) -> bytes:
    """A seed changed one to four times."""
    data = rng.choice(target.seeds)
    for _ in range(rng.choice((1, 1, 2, 4))):
        knowing = target.twist is not None and rng.random() < 0.5
        data = target.twist(rng, data) if knowing and target.twist else scrambled(rng, data, rng.choice(target.seeds))
    return target.repair(data[:LARGEST])


def scrambled(rng: Random, data: bytes, other: bytes) -> bytes:
    """Bits, sizes and pieces changed, without knowing what they are."""
    at, width = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 4, 8, 100))
    head, tail = data[:at], data[at:]
    match rng.randrange(8):
        case 0 | 1 if tail:
            return head + bytes([tail[0] ^ 1 << rng.randrange(8)]) + tail[1:]
        case 2 | 3:
            size = rng.choice((*SIZES, len(data), len(data) + rng.randrange(-40, 40))) % (1 << 8 * min(width, 8))
            return head + size.to_bytes(width, rng.choice(("little", "big"))) + tail[width:]
        case 4:
            return head + other[rng.randrange(len(other) + 1) :]
        case 5:
            return head + tail[width:] if rng.random() < 0.5 else head + tail[:width] + tail
        case 6:
            return head + rng.choice(PIECES) + tail[rng.choice((0, 1, 4)) :]
        case _:
            return head


def crc_again(data: bytes) -> bytes:
    """With a CRC-32 that fits, as whoever can count sends it."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4])) if len(data) > 4 else data


def message_twisted(rng: Random, data: bytes) -> bytes:
    """A message with one array dropped, renamed, reshaped, recast or with a number changed; else as it was."""
    try:
        read = Message.decode(data)
    except NTKFLError:
        return data
    arrays = dict(read.arrays)
    if read.halves:  # as they travel, so that their exponents are changed too
        arrays |= {name: arrays[name].half() for name in read.halves}
        arrays["exponents"] = torch.full((len(read.halves),), 14, dtype=torch.int16)
    if not arrays:
        return data
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    match rng.randrange(7):
        case 0:
            pass
        case 1:
            at = rng.randrange(len(name))
            arrays[rng.choice([*arrays, "x", name[:at] + rng.choice("0T/.-") + name[at + 1 :]])] = array
        case 2:
            arrays[name] = array.reshape(rng.choice([(-1,), (1, -1), (-1, 1, 1), (1,) * 5 + (array.numel(),)]))
        case 3 if array.ndim:
            arrays[name] = torch.cat([array] * rng.randrange(1, 4)) if rng.random() < 0.5 else array[: rng.randrange(3)]
        case 4:
            arrays[name] = array.detach().nan_to_num().to(rng.choice(TYPES))
        case 5 if array.numel():
            flat, number = array.detach().double().reshape(-1).clone(), rng.choice(NUMBERS)
            flat[rng.randrange(len(flat))] = number
            whole = array.dtype if array.is_floating_point() else torch.float32
            arrays[name] = flat.reshape(array.shape).to(rng.choice((whole, array.dtype)))
        case _:
            arrays[name] = torch.empty(rng.choice([(0,), (0, (1 << 31) - 1), (3, 0, 1 << 20)]), dtype=array.dtype)
    try:
        kind, round = rng.choice((*[read.kind] * 3, *KINDS)), rng.choice((read.round, read.round, 0, 2**32 - 1))
        return Message(kind, round, arrays).encode()
    except (ValueError, struct.error):
        return data


def document_twisted(rng: Random, data: bytes, toml: bool = False) -> bytes:
    """A document of JSON (or a line of one) or TOML, with one value replaced, removed or added."""
    with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        lines = [data] if toml else data.split(b"\n")
        at = rng.randrange(len(lines))
        document = tomllib.loads(data.decode()) if toml else json.loads(lines[at])
        holders, waiting = list[Any](), [document]
        while waiting:
            here = waiting.pop()
            if isinstance(here, dict | list):
                holders.append(here)
                waiting += here.values() if isinstance(here, dict) else here[:20]
        holder = rng.choice(holders)
        key = rng.choice([*holder, "self", "name"]) if isinstance(holder, dict) else rng.randrange(len(holder))
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = rng.choice(VALUES)
        lines[at] = (tomli_w.dumps(document) if toml else json.dumps(document)).encode()
        return b"\n".join(lines)
    return data


toml_twisted = partial(document_twisted, toml=True)


def zip_again(data: bytes) -> bytes:
    """With the checksums of stored members made right in both places, so that a change gets past them."""
    out = bytearray(data)
    with suppress(Exception), zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            at = member.header_offset
            start = at + 30 + sum(struct.unpack("<HH", data[at + 26 : at + 30]))
            new = zlib.crc32(data[start : start + member.file_size])
            out = out.replace(struct.pack("<I", member.CRC), struct.pack("<I", new)) if member.CRC else out
    return bytes(out)


# -- Targets ---------------------------------------------------------------------------------------------------------


def file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """Decoding by way of a file, which is as before afterwards."""
    whole = path.read_bytes() if path.exists() else b""

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read(path)
        finally:
            path.write_bytes(whole)

    return check


def messages(scratch: Path) -> Iterator[Target]:
    linear = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    convolution = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    tokens = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(9, 3))
    networks = {
        "linear": (linear, torch.randn(3, 4), "factored"),
        "dense": (linear, torch.randn(2, 4), "dense"),
        "convolution": (convolution, torch.randn(2, 2, 4, 4), "factored"),
        "embedding": (tokens, torch.randint(0, 7, (2, 3)), "auto"),
    }

    def jacobian(columns: int, data: bytes) -> None:
        J = unpack_jacobian(Message.decode(data), 3, columns, torch.zeros(1))
        assert J.shape == (len(J), 3, columns)
        assert J.jvp(torch.ones(columns)).shape == (len(J), 3)
        assert J.vjp(torch.ones(len(J), 3)).shape == (columns,)

    def message(data: bytes) -> None:
        read = Message.decode(data)
        assert read.encode() == data, "what was read is not what was written"
        for name in read.arrays:
            read.take(name)

    sent = [Message("weights", 0, {}).encode()]
    for name, (model, x, form) in networks.items():
        J = ntkfl.jacobian(model, x, form=form)
        sent.append(Message("rows", 3, pack_jacobian(J)).encode())
        yield Target(f"jacobian {name}", sent[-1:], partial(jacobian, J.shape[2]), message_twisted, crc_again)
    yield Target("message forged", sent, message, message_twisted, crc_again)


ROUNDS: dict[str, dict[str, Any]] = {  # each kind of reply, and each codec of one
    "ntk-fl": {"steps": (5.0, 20.0, 50.0, 200.0, 1000.0, 4000.0)},
    "cp-ntk-fl": {},
    "sum-ntk-fl": {},
    "sum-ridge": {},
    "scaffold": {"local_steps": 2},
    "qsgd": {},
}


def rounds(scratch: Path) -> Iterator[Target]:
    for name, options in ROUNDS.items():
        privacy = Privacy(shuffle=False, projected_dim=None) if name == "cp-ntk-fl" else None
        yield from messages_of(METHODS[name](**options), privacy)


def messages_of(method: Method, privacy: Privacy | None) -> Iterator[Target]:
    """Every message of the method's first round, either way: one client, or the server, says something else."""
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    task = Task(network, 3, method.loss, total_clients=4, privacy=settle(method, privacy)[0])
    task.example = torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64)
    clients = [ClientRound(i, torch.randn(4, 5), torch.arange(4) % 3, Randomness.simulated(i)) for i in range(2)]
    state = method.start(task, task.like)
    asked, told = list[Message](), list[list[Message]]()

    def driven(exchange: Callable[[Any], list[Message]]) -> State:
        """The round, each exchange's messages parsed as a server parses them."""
        generator = method.round(task, state, 1, [0, 1])
        question = next(generator)
        while True:
            first = question if isinstance(question, Message) else question[0]
            kind = method.replies[first.kind]
            try:
                question = generator.send([kind.parse(message, task) for message in exchange(question)])
            except StopIteration as end:
                after: State = end.value.state
                return after

    def exchange(question: Any) -> list[Message]:
        each = [question if isinstance(question, Message) else question[client.id] for client in clients]
        asked.append(each[0])
        told.append([method.answer(task, m, c).message(1) for m, c in zip(each, clients, strict=True)])
        return told[-1]

    driven(exchange)

    def server(number: int, data: bytes) -> None:
        forged = Message.decode(data)
        replies = iter([[forged if i == number else own[0], own[1]] for i, own in enumerate(told)])
        after = driven(lambda _: next(replies))
        assert all(bool(t.isfinite().all()) for t in after.values() if t.is_floating_point())
        assert after["weights"].shape == state["weights"].shape

    def client(data: bytes) -> None:
        method.answer(task, Message.decode(data), clients[0]).message(1).encode()

    for number, (question, replies) in enumerate(zip(asked, told, strict=True)):
        sent, check = [replies[0].encode()], partial(server, number)
        yield Target(f"server {method.name} {replies[0].kind}", sent, check, message_twisted, crc_again)
        sent = [question.encode()]
        yield Target(f"client {method.name} {question.kind}", sent, client, message_twisted, crc_again)


def services(scratch: Path) -> Iterator[Target]:
    """What the roles sign and seal for one another, and the shuffler's state on a disk that gives back other bytes."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from ntkfl.crypto.context import Secret, bind
    from ntkfl.crypto.hpke import SealingKey, SigningKey
    from ntkfl.crypto.row_frames import Announced, BatchKey, pack_rows, unpack_rows
    from ntkfl.crypto.signed import Credential, open_run_secret, seal_run_secret
    from ntkfl.services.announcement import Batch, Head, Question
    from ntkfl.services.peers import AggregatorPeer, Peers, RoundTerms, ServicePeer
    from ntkfl.services.store import BatchStore

    names, key = ("federation-0", "run-0"), BatchKey(3, 0)
    said = Announced(key, bytes(range(32)))
    signer = SigningKey(Ed25519PrivateKey.from_private_bytes(b"s" * 32))
    opener = SealingKey(X25519PrivateKey.from_private_bytes(b"o" * 32))
    framed = [pack_rows(said, [b"abcd", b"efgh"]), pack_rows(said, [bytes(90)])]
    batch, message = Batch(key, 3, 10, 120, 2), b"weights"
    public = signer.public.hex()
    peers = Peers(
        federation=names[0],
        round=RoundTerms(clients=3, least=2),
        key_server=ServicePeer(url="https://k", signing_key=public),
        shuffler=ServicePeer(url="https://s", signing_key=public),
        aggregator=AggregatorPeer(signing_key=public),
    )
    head = Head(names[1], batch, opener.public.hex(), "ab" * 32, hashlib.sha256(message).hexdigest())
    announced = [head.sign(signer, names[0])]
    questions = [Question.pack(announced[0], message)]
    credential = Credential(names[0], "client-0", opener.public.hex(), public)
    seed = json.dumps(seal_run_secret(Secret(bytes(32)), opener.public, signer, *names, "client-0")).encode()

    def rows(data: bytes) -> None:
        found = unpack_rows(data)
        assert pack_rows(*found) == data

    def signed_again(data: bytes) -> bytes:
        return signer.sign(data[64:], bind("ntkfl announcement v4", names[0])) + data[64:]

    def announcement(data: bytes) -> None:
        found = Head.check(data, peers)
        assert Head.check(found.sign(signer, names[0]), peers) == found

    def question(data: bytes) -> None:
        Question.check(data, peers)
        assert data in questions, "accepted, though it is not what was signed"

    def payload(data: bytes) -> None:
        signature = signer.sign(data, bind("ntkfl credential v3", names[0]))
        found = Credential.check(base64.b64encode(signature + data).decode(), signer.public, names[0])
        assert found.payload() == data

    def run_secret(data: bytes) -> None:
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            values = {"signature": data.hex()}
        assert open_run_secret(values, opener, signer.public, *names, "client-0").reveal() == bytes(32)

    kept, said_there, numbers = scratch / "shuffler.sqlite", Announced.of(key, b"signed"), count()
    store = BatchStore(kept, run="f/r")
    store.open(Batch(key, 2, 1, 4, 2), said_there.digest)
    store.submit("a", said_there, [b"abcd"])
    store.close()

    def state(data: bytes) -> None:
        path = scratch / f"state-{next(numbers)}.sqlite"  # a failure's connection keeps the lock of its file
        path.touch(0o600)
        path.write_bytes(data)
        store = BatchStore(path, run="f/r")
        try:
            store.submit("b", said_there, [b"efgh"])
            assert sorted(store.release(key).rows) == [b"abcd", b"efgh"]
        finally:
            store.close()
            for left in scratch.glob(f"{path.stem}*"):
                left.unlink()

    yield Target("rows forged", framed, rows, repair=crc_again)
    yield Target("question", questions, question)
    yield Target("announcement signed", announced, announcement, repair=signed_again)
    yield Target("credential payload", [credential.payload()], payload, document_twisted)
    yield Target("sealed run secret", [seed], run_secret, document_twisted)
    yield Target("shuffler state", [kept.read_bytes()], state)


RUN = {"rounds": 2, "clients_per_round": 2, "data": {"dataset": "digits", "clients": 4}, "model": {"hidden": [3]}}
SETTINGS = tomli_w.dumps(RUN | {"method": {"name": "cp-ntk-fl", "lr": 0.01, "steps": [10.0, 100.0]}}).encode()


def folders(scratch: Path) -> Iterator[Target]:
    """Run folders and exports that came back changed: said on the page, which is never broken by them."""
    run = scratch / "run"
    execute(RunConfig(**RUN, method={"name": "ntk-fl", "steps": [5.0, 50.0]}), out=run)  # type: ignore[arg-type]
    folder = RunFolder(run)
    expected = folder.load_checkpoint()

    def shown(_: Path) -> None:
        assert render("t", [view(one) for one in find([run])])
        json.dumps(folder.records(), allow_nan=False)

    def checkpoint(_: Path) -> None:
        round, tensors = folder.load_checkpoint()
        assert round == expected[0]
        assert all(t.equal(expected[1][name]) for name, t in tensors.items())

    def configuration(path: Path) -> None:
        config = RunConfig.read(path)
        spelled_out(config)
        if ":" not in config.model.name:  # which is code of its user's
            build_network(config.model.suited(config.built_method), (8,), 3, config.seed)

    def target(path: Path, read: Callable[[Path], object], twist: Callable[[Random, bytes], bytes] | None) -> Target:
        return Target(path.name, [path.read_bytes()], file(path, read), twist)

    settings = scratch / "settings.toml"
    settings.write_bytes(SETTINGS)
    yield target(settings, configuration, toml_twisted)
    yield target(run / "config.toml", shown, toml_twisted)
    yield target(run / "history.jsonl", shown, document_twisted)
    yield target(run / "checkpoint/state.safetensors", checkpoint, None)


def saved(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def data_files(scratch: Path) -> Iterator[Target]:
    x, y = np.linspace(0, 1, 24, dtype=np.float32).reshape(6, 4), np.arange(6) % 2
    lines = "".join(f"{i},{i}.5,{i % 2},site-{i % 3},{'test' if i > 3 else 'train'}\n" for i in range(6))
    csv = ("a,b,label,client,split\n" + lines).encode()

    def table(path: Path) -> None:
        read = from_file(path)
        assert len(read) > 0
        assert bool(read.rows.x.isfinite().all())
        assert read.classes is None or int(read.rows.y.max()) < read.classes

    yield Target("csv", [csv], file(scratch / "table.csv", table))
    yield Target("npz of clients", [saved(x=x, y=y, client=y)], file(scratch / "t.npz", table), repair=zip_again)
    yield Target("npz", [saved(x=x, y=y), saved(x=x, y=x)], file(scratch / "c.npz", table), repair=zip_again)


# -- The test --------------------------------------------------------------------------------------------------------


class TooLongError(BaseException):
    """No `except Exception` of the code under test may swallow it."""


@contextmanager
def confined() -> Iterator[None]:
    """No allocation beyond some room and no case beyond some seconds."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TooLongError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def problem(target: Target, data: bytes) -> str:
    """What went wrong; empty where the input was accepted, or refused as it should be."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        target.check(data)
    except NTKFLError as error:
        return "an error of several lines" if "\n" in str(error) else ""
    except (Exception, TooLongError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""


@pytest.mark.parametrize("room", [messages, rounds, services, folders, data_files])
def test_no_decoder_or_parser_fails_otherwise_than_it_should(
    room: Callable[[Path], Iterator[Target]], tmp_path: Path
) -> None:
    found: dict[str, str] = {}
    (tmp_path / "made").mkdir()
    for target in room(tmp_path / "made"):
        for seed in target.seeds:
            target.check(seed)
        with confined():
            for number in range(CASES):
                data = changed(Random(f"{SEED}/{target.name}/{number}"), target)
                if wrong := problem(target, data):
                    found[f"{target.name}: {wrong[:200]}"] = f"case {number}, {len(data)} bytes"
    shutil.rmtree(tmp_path / "made")
    assert found == {}


def test_defects_are_told_from_refusals() -> None:
    def check(data: bytes) -> None:
        if data == b"refused":
            raise NTKFLError("no")
        if data == b"lines":
            raise NTKFLError("two\nlines")
        if data == b"hungry":
            bytearray(4 << 30)

    target = Target("t", [b"fine"], check)
    with confined():
        assert problem(target, b"fine") == problem(target, b"refused") == ""
        assert "several lines" in problem(target, b"lines")
        assert "MemoryError" in problem(target, b"hungry")
