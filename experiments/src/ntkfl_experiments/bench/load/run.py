"""A load and its figures: enrolment, rounds of uploads for as long as asked, and two rounds with too little memory.

Every round, rows are opened at the aggregator's end and compared with what was sent: all of them, each once, byte for
byte. Clients seal before the round's clock starts; from the announcement to the last acknowledgement is the services'.
Who has uploaded asks the key server for ρ again, as one that was started anew would: both services are at work.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ntkfl.crypto.hpke import SEAL_BYTES, SealingKey, SigningKey
from ntkfl.crypto.row_frames import Announced, BatchKey, open_row
from ntkfl.errors import ConfigError, MessageError
from ntkfl.services.announcement import Announcement
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.client import ShufflerClient
from ntkfl.wire import Message
from ntkfl_experiments.bench.load.clients import LoadClient, Tally, frame, owner, side_by_side
from ntkfl_experiments.bench.load.hostile import Hostile
from ntkfl_experiments.bench.load.world import World

Say = Callable[[str, float], None]  # a line, and the seconds that are left


@dataclass(frozen=True)
class Load:
    """Rows are of the size `configs/cp.toml` sends, the announcement holds the weights of its network."""

    clients: int = 1000
    at_once: int = 200
    rows: int = 60
    row_bytes: int = 12_151
    weights: int = 79_510
    seconds: float = 180
    hostile: int = 28
    repeat: int = 10  # every so many-th upload is sent twice, as if its answer had been lost

    def __post_init__(self) -> None:
        if not 2 <= self.at_once <= self.clients or self.row_bytes < SEAL_BYTES + 100 or self.rows < 1:
            raise ConfigError(
                f"from 2 to all clients upload at once, one row or more of at least {SEAL_BYTES + 100} bytes"
            )

    @property
    def submission(self) -> int:
        """Bytes, but for its frame."""
        return self.rows * self.row_bytes


class Loading:
    """A load on a world whose services run."""

    def __init__(self, load: Load, world: World, say: Say) -> None:
        self.load, self.world, self.say, pins = load, world, say, world.pins
        context = ssl.create_default_context(cafile=str(world.folder / "aggregator" / "ca.pem"))
        names = [f"client-{i}" for i in range(load.clients)]
        self.clients = {name: LoadClient(name, world.folder / "clients" / name, pins, context) for name in names}
        folder = world.folder / "aggregator"
        self.shuffler = ShufflerClient(pins, folder)
        self.opener = SealingKey.generate()
        self.signer = SigningKey.load(folder / "signing-key.pem")
        insider = f"client-{load.clients}"  # has enrolled, and means no good
        self.insider = LoadClient(insider, world.folder / "clients" / insider, pins, context)
        self.hostile = Hostile(pins, context, self.insider)
        self.rounds: list[dict[str, Any]] = []
        self.duplicates_refused = 0
        self._rho, self._seeds = b"", Tally()
        self._signed = b""

    async def run(self) -> dict[str, Any]:
        load, watch = self.load, self.world.watch
        enrolment = await self._enrol()
        bad = [asyncio.create_task(self.hostile.misbehave(i)) for i in range(load.hostile)]
        began = watch.now
        number = 0
        while watch.now - began < load.seconds or number < 2:
            number += 1
            self.rounds.append(await self._round(number, "load"))
            ended = watch.now
            took = (ended - began) / number
            self._said(self.rounds[-1], max(0.0, load.seconds - (ended - began)) + 2 * took)
        for task in bad:
            task.cancel()
        await asyncio.gather(*bad, return_exceptions=True)
        totals = self._totals((began, watch.now))
        under_pressure = await self._pressure(number)
        for client in (*self.clients.values(), self.insider):
            await client.close()
        return {
            "settings": asdict(load),
            "enrolment": enrolment,
            "rounds": self.rounds,
            "totals": totals,
            "pressure": under_pressure,
            "hostile": {f"{what}: {how}": n for (what, how), n in sorted(self.hostile.met.items())},
            "memory": {
                "seconds": watch.seconds,
                "resident_mib": watch.memory,
                "open_files": watch.files,
                "load_from_to": [round(began, 1), round(began + totals["seconds"], 1)],
            },
        }

    async def _enrol(self) -> dict[str, Any]:
        """All clients, `at_once` at a time: each enrols, gets ρ, and says hello to the shuffler."""
        enrolling, greeting = Tally(), Tally()
        seeds: Counter[bytes] = Counter()

        async def one(client: LoadClient) -> None:
            seeds[await client.enrol(enrolling)] += 1
            await client.hello(greeting)

        began = time.perf_counter()
        await side_by_side(self.load.at_once, [lambda c=c: one(c) for c in self.clients.values()])  # type: ignore[misc]
        seconds = time.perf_counter() - began
        seeds[await self.insider.enrol(Tally())] += 1
        if len(seeds) != 1 or len(self.shuffler.clients("client")) != self.load.clients:
            raise MessageError("the key server gave out different seeds, or the shuffler lost a client")
        (self._rho,) = seeds
        self.say(f"{self.load.clients} clients enrolled in {seconds:.1f} s", self.load.seconds)
        return {
            "seconds": round(seconds, 2),
            "key_server": enrolling.figures() | {"per_second": round(len(enrolling.seconds) / seconds, 1)},
            "hello": greeting.figures(),
        }

    async def _round(self, number: int, phase: str) -> dict[str, Any]:
        """One batch: announced to all clients, answered by `at_once` of them at the same time, released, compared."""
        load, pins, key = self.load, self.world.pins, BatchKey(number, 0)
        names = list(self.clients)
        first = (number - 1) * load.at_once % load.clients
        cohort = tuple((names + names)[first : first + load.at_once])
        batch = Batch(key, cohort, load.rows, load.row_bytes, load.at_once, 600)
        weights = Message("weights", number, {"weights": torch.zeros(load.weights)})
        self._signed = Announcement("exchange", key, batch, weights, self.opener.public).sign(
            self.signer, pins.federation, pins.run
        )
        announced = Announced.of(key, self._signed)
        frames = {
            name: await asyncio.to_thread(frame, name, announced, load.rows, load.row_bytes, self.opener.public, pins)
            for name in cohort
        }
        uploads, polls = Tally(), Tally()
        heard: list[float] = []
        sent: list[float] = []

        async def one(client: LoadClient, again: bool) -> None:
            if await client.next_announcement(polls) != self._signed:
                raise MessageError(f"{client.name} heard another announcement than was made")
            heard.append(time.perf_counter())
            if client.name not in frames:
                return
            status = await client.upload(uploads, frames[client.name])
            if status != 200 and not (status == 409 and uploads.cut):  # here already: only its answer was lost
                raise MessageError(f"{client.name}'s rows were refused: {status}")
            sent.append(time.perf_counter())
            if await client.seed(self._seeds) != self._rho:
                raise MessageError(f"the key server gave {client.name} another seed than before")
            if again:
                status = await client.upload(Tally(), frames[client.name])
                self.duplicates_refused += status == 409

        asked = dict.fromkeys(cohort[:: load.repeat])
        listening = [asyncio.create_task(one(c, c.name in asked)) for c in self.clients.values()]
        await asyncio.sleep(0.5)  # so that all of them wait when it is published
        published = time.perf_counter()
        await asyncio.to_thread(self.shuffler.publish, self._signed)
        await asyncio.gather(*listening)
        rows = await asyncio.to_thread(self.shuffler.release, announced)
        await asyncio.to_thread(self.shuffler.forget, key)
        lost, doubled = await asyncio.to_thread(self._compare, rows, announced, cohort)
        window = max(sent) - published
        return {
            "number": number,
            "phase": phase,
            "at": round(self.world.watch.now, 1),
            "rows": len(rows),
            "lost": lost,
            "duplicated": doubled,
            "seconds": round(window, 3),
            "rows_per_second": round(len(rows) / window, 1),
            "mib_per_second": round(len(rows) * load.row_bytes / 2**20 / window, 1),
            "announced_to_all_s": round(max(heard) - published, 3),
            "upload": uploads.figures(),
        }

    def _compare(self, rows: list[bytes], announced: Announced, cohort: tuple[str, ...]) -> tuple[int, int]:
        """Rows missing, and rows too many, among those released; every byte is checked."""
        pins = self.world.pins
        seen = Counter(owner(open_row(self.opener, row, pins.federation, pins.run, announced)) for row in rows)
        expected = Counter((name, announced.key.round, i) for name in cohort for i in range(self.load.rows))
        return (expected - seen).total(), (seen - expected).total()

    async def _pressure(self, number: int) -> dict[str, Any]:
        """The shuffler again, with memory for an eighth of what is sent at once: it says so, and all arrives."""
        held = max(1, -(-2 * self.load.submission // 2**20), self.load.submission * self.load.at_once // 8 // 2**20)
        self.world.stop("shuffler")
        self.world.start("shuffler", "--held", str(held))
        idle = self.world.peak("shuffler")
        rounds = []
        for i in (1, 2):
            rounds.append(await self._round(number + i, "pressure"))
            self._said(rounds[-1], (2 - i) * rounds[-1]["seconds"])
        self.rounds += rounds
        return {
            "held_mib": held,
            "turned_away": sum(r["upload"]["turned_away"] for r in rounds),
            "sent_at_once_mib": round(self.load.submission * self.load.at_once / 2**20, 1),
            "memory": {"idle_mib": idle, "peak_mib": self.world.peak("shuffler")},
        }

    def _said(self, done: dict[str, Any], left: float) -> None:
        what = "" if done["phase"] == "load" else ", little memory"
        upload = done["upload"]
        self.say(
            f"round {done['number']}{what}: {done['rows']:,} rows, {done['rows_per_second']:,.0f} a second, p99 "
            f"{upload['p99_ms']:,.0f} ms, turned away {upload['turned_away']}",
            left,
        )

    def _totals(self, span: tuple[float, float]) -> dict[str, Any]:
        """Over the rounds under load. Memory: the median of the second quarter of the time against that of the last."""
        rounds = self.rounds
        memory = {}
        for service in ("key-server", "shuffler"):
            quarter = (span[1] - span[0]) / 4
            early = self.world.watch.between(service, span[0] + quarter, span[0] + 2 * quarter)
            late = self.world.watch.between(service, span[1] - quarter, span[1])
            with suppress(statistics.StatisticsError):
                memory[service] = {
                    "second_quarter_mib": round(statistics.median(early), 1),
                    "last_quarter_mib": round(statistics.median(late), 1),
                    "peak_mib": round(max(self.world.watch.between(service, *span)), 1),
                }
        return {
            "rounds": len(rounds),
            "seconds": round(span[1] - span[0], 1),
            "rows": sum(r["rows"] for r in rounds),
            "lost": sum(r["lost"] for r in rounds),
            "duplicated": sum(r["duplicated"] for r in rounds),
            "sent_twice_and_refused": self.duplicates_refused,
            "rows_per_second": round(statistics.median(r["rows_per_second"] for r in rounds), 1),
            "mib_per_second": round(statistics.median(r["mib_per_second"] for r in rounds), 1),
            "p50_ms": statistics.median(r["upload"]["p50_ms"] for r in rounds),
            "p99_ms": max(r["upload"]["p99_ms"] for r in rounds),
            "key_server": self._seeds.figures()
            | {"per_second": round(len(self._seeds.seconds) / (span[1] - span[0]), 1)},
            "memory": memory,
        }


def run(load: Load, folder: Path, say: Say) -> dict[str, Any]:
    """Load the services of a new federation in `folder` (empty, and of no use afterwards): all figures, for JSON."""
    say(f"making a federation of {load.clients} clients", load.seconds)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # that hostile connections were cut is no news
    world = World(folder, load.clients + 1, load.at_once)
    with world.running():
        return asyncio.run(Loading(load, world, say).run())
