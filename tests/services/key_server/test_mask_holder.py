"""The key server as the second holder of masks: one sum for one released set, and nothing of a client by itself."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.mask_tickets import ReleasedSet, check_ticket, pack_released, sign_ticket, unpack_released
from ntkfl.crypto.masking import pack_words, sum_masks
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.errors import MessageError, Refused, TrustError
from ntkfl.services.key_server import mask_holder

RUN, SAID = "run", Announced.of(BatchKey(3, 0), b"announced")
SEEDS = {name: bytes([i]) * 32 for i, name in enumerate(("ada", "bob", "cyd", "dan"), 1)}


@pytest.fixture
def db() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:", isolation_level=None)
    mask_holder.prepare(made)
    return made


def taken(db: sqlite3.Connection, said: Announced = SAID) -> dict[str, bytes]:
    return {name: mask_holder.take_seed(db, RUN, name, said, seed) for name, seed in SEEDS.items()}


def released(tickets: list[bytes], said: Announced = SAID) -> ReleasedSet:
    return ReleasedSet(said, 5, sorted(tickets))


def test_the_masks_are_those_of_the_released_set_alone(db: sqlite3.Connection) -> None:
    """dan gave a seed and never reached the shuffler: it is in no sum, and its seed goes with the others."""
    tickets = taken(db)
    got = mask_holder.release(db, RUN, released([tickets[name] for name in ("ada", "bob", "cyd")]), 2)
    assert got == pack_words(sum_masks([SEEDS[name] for name in ("ada", "bob", "cyd")], SAID, 5))
    assert db.execute("SELECT COUNT(*) FROM second_seeds").fetchone() == (0,)


def test_one_set_is_summed_and_no_other(db: sqlite3.Connection) -> None:
    """The same again is the same answer; a set that differs by one client would be that client's mask."""
    tickets = taken(db)
    most = [tickets[name] for name in ("ada", "bob", "cyd")]
    first = mask_holder.release(db, RUN, released(most), 2)
    assert mask_holder.release(db, RUN, released(most), 2) == first
    with pytest.raises(Refused, match="for one set"):
        mask_holder.release(db, RUN, released(list(tickets.values())), 2)
    with pytest.raises(Refused, match="for one set"):
        mask_holder.release(db, RUN, released(most, Announced.of(BatchKey(2, 0), b"older")), 2)
    with pytest.raises(Refused, match="asked for already"):
        mask_holder.take_seed(db, RUN, "eve", SAID, bytes(32))


def test_nothing_below_the_floor_and_nothing_of_other_announcements(db: sqlite3.Connection) -> None:
    tickets = taken(db)
    with pytest.raises(Refused, match="fewer than 3"):
        mask_holder.release(db, RUN, released(list(tickets.values())[:2]), 3)
    with pytest.raises(Refused, match="gave no seed here"):
        mask_holder.release(db, RUN, released([*tickets.values(), bytes(16)]), 3)
    other = Announced.of(SAID.key, b"other weights")
    with pytest.raises(Refused, match="gave no seed here"):
        mask_holder.release(db, RUN, released(list(tickets.values()), other), 3)
    with pytest.raises(Refused, match="gave no seed here"):
        mask_holder.release(db, "another", released(list(tickets.values())), 3)
    assert len(mask_holder.release(db, RUN, released(list(tickets.values())), 3)) == 20  # nothing was used up


def test_a_seed_is_taken_once(db: sqlite3.Connection) -> None:
    """A client that lost the answer gets it again; it cannot put another seed in the place of the first."""
    first = mask_holder.take_seed(db, RUN, "ada", SAID, SEEDS["ada"])
    assert mask_holder.take_seed(db, RUN, "ada", SAID, SEEDS["ada"]) == first
    with pytest.raises(Refused, match="another seed"):
        mask_holder.take_seed(db, RUN, "ada", SAID, SEEDS["bob"])
    later = Announced.of(BatchKey(4, 0), b"later")
    assert mask_holder.take_seed(db, RUN, "ada", later, SEEDS["bob"]) != first
    with pytest.raises(Refused, match="later one"):
        mask_holder.take_seed(db, RUN, "ada", SAID, SEEDS["ada"])
    with pytest.raises(Refused, match="32 bytes"):
        mask_holder.take_seed(db, RUN, "bob", SAID, b"short")


def test_seeds_leave_the_file(tmp_path: Path) -> None:
    """What is left after the release holds none of the seeds, of none of the clients."""
    path = tmp_path / "state"
    db = sqlite3.connect(path, isolation_level=None)
    mask_holder.prepare(db)
    tickets = taken(db)
    assert all(seed in path.read_bytes() for seed in SEEDS.values())
    mask_holder.release(db, RUN, released(list(tickets.values())), 2)
    db.close()
    assert not any(seed in path.read_bytes() for seed in SEEDS.values())


def test_tickets_and_sets_are_bound_to_what_they_are_for() -> None:
    key, other, ticket = SigningKey.generate(), SigningKey.generate(), bytes(range(16))
    signed = ticket + sign_ticket(key, "federation", RUN, "ada", SAID, ticket)
    assert check_ticket(signed, key.public, "federation", RUN, "ada", SAID) == ticket
    changed = bytes([1]) + signed[1:]
    for wrong in (
        (signed, other.public, "federation", RUN, "ada", SAID),
        (signed, key.public, "another", RUN, "ada", SAID),
        (signed, key.public, "federation", "another", "ada", SAID),
        (signed, key.public, "federation", RUN, "bob", SAID),
        (signed, key.public, "federation", RUN, "ada", Announced.of(SAID.key, b"other")),
        (changed, key.public, "federation", RUN, "ada", SAID),
        (b"", key.public, "federation", RUN, "ada", SAID),
    ):
        with pytest.raises(TrustError):
            check_ticket(*wrong)
    listed = pack_released(key, "federation", RUN, released([ticket, bytes(16)]))
    assert unpack_released(listed, key.public, "federation", RUN) == released([ticket, bytes(16)])
    for signer, run in ((other.public, RUN), (key.public, "another")):
        with pytest.raises(TrustError):
            unpack_released(listed, signer, "federation", run)
    twice = pack_released(key, "federation", RUN, ReleasedSet(SAID, 5, [ticket, ticket]))
    with pytest.raises(MessageError, match="twice"):
        unpack_released(twice, key.public, "federation", RUN)
