"""An aggregator with true keys that cheats, and others who try: real services, asked over TLS on loopback."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.row_frames import Announced, BatchKey, open_row, pack_rows
from ntkfl.errors import MessageError, NTKFLError, Refused, TrustError
from ntkfl.services.announcement import Question
from ntkfl.services.answered import take
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.signing import AGGREGATOR
from tests.services.federation import RUN, TERMS, Aggregator, Federation, Member, federation, raw, signed_headers
from tests.services.shuffler.batches import refusal

FIRST, LATER = BatchKey(1, 0), BatchKey(1, 1)
NAMES = ("client-0", "client-1", "client-2")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Federation]:
    with federation(tmp_path) as found:
        yield found


def begun(made: Federation, names: tuple[str, ...] = NAMES) -> tuple[Aggregator, list[Member]]:
    """A run that these clients have come to."""
    aggregator, members = made.aggregator, [made.client(name) for name in names]
    aggregator.shuffler.begin(TERMS)
    for member in members:
        member.hello()
    return aggregator, members


def row(name: str) -> list[bytes]:
    return [name.encode().ljust(10)]


def opened(made: Federation, aggregator: Aggregator, signed: bytes) -> list[bytes]:
    """What the shuffler releases, sorted."""
    announced = Announced.of(FIRST, signed)
    batch = Question.check(aggregator.question(signed), made.peers).head.batch
    rows = aggregator.shuffler.release(announced, batch)
    return sorted(open_row(aggregator.opener, one, made.peers.federation, RUN, announced) for one in rows)


# -- Who is asked


def test_a_cohort_names_clients_that_have_come_and_as_many_as_agreed(made: Federation) -> None:
    """With a ghost beside three true clients, the difference to a round of four would be the fourth's sum."""
    aggregator, _ = begun(made, NAMES[:2])
    for cohort, reason in [
        (("client-0", "client-1", "ghost"), "strangers"),  # invented
        (NAMES, "strangers"),  # enrolled by a token, never seen
        (NAMES[:2], "terms"),  # fewer than agreed
    ]:
        with refusal(reason):
            aggregator.shuffler.publish(aggregator.head(FIRST, cohort, min_clients=2))
    made.client("client-2").hello()
    aggregator.shuffler.publish(aggregator.head(FIRST, NAMES))


def test_a_question_kept_from_one_client_releases_nothing(made: Federation) -> None:
    """Flower carries the questions, so the aggregator decides who hears one."""
    aggregator, members = begun(made)
    with refusal("below-floor"):
        aggregator.shuffler.publish(aggregator.head(FIRST, NAMES, min_clients=2))
    signed = aggregator.head(FIRST, NAMES)
    aggregator.shuffler.publish(signed)
    for member, name in zip(members[:2], NAMES, strict=False):
        member.submit(signed, row(name))
    assert aggregator.shuffler.status(FIRST).state == "open"
    with refusal("not-ready"):
        opened(made, aggregator, signed)
    members[2].submit(signed, row(NAMES[2]))
    assert opened(made, aggregator, signed) == [name.encode().ljust(10) for name in NAMES]


# -- What is asked


def test_all_clients_answer_one_question_under_one_set_of_terms(made: Federation) -> None:
    aggregator, members = begun(made)
    signed, other = aggregator.head(FIRST, NAMES), aggregator.head(FIRST, NAMES, b"other weights")
    aggregator.shuffler.publish(signed)
    with refusal("other-announcement"):
        aggregator.shuffler.publish(other)
    with refusal("other-announcement"):  # a client that was asked another thing
        members[0].submit(other, row("client-0"))
    with refusal("other-terms"):
        aggregator.shuffler.publish(aggregator.head(BatchKey(2, 0), NAMES, terms="cd" * 32))
    with refusal("other-terms"):
        aggregator.shuffler.begin("cd" * 32)
    with refusal("malformed"):  # not the aggregator's
        aggregator.shuffler.publish(bytes(64) + signed[64:])


def test_a_client_checks_before_it_answers(made: Federation, tmp_path: Path) -> None:
    aggregator = made.aggregator
    folder = made.folder / "clients" / "client-0"

    def asked(
        key: BatchKey = FIRST, message: bytes = b"weights", cohort: tuple[str, ...] = NAMES, terms: str = TERMS
    ) -> Question:
        signed = aggregator.head(key, cohort, message, terms=terms)
        return Question.check(aggregator.question(signed, message), made.peers)

    question = asked()
    take(folder, question)
    take(folder, question)  # the same may come again
    for other, why in [
        (asked(message=b"others"), "before"),
        (asked(BatchKey(0, 0)), "past"),
        (asked(LATER, terms="cd" * 32), "other terms"),
        (asked(LATER, cohort=("client-0", "client-1", "ghost")), "another cohort"),
    ]:
        with pytest.raises(TrustError, match=why):
            take(folder, other)
    take(folder, asked(LATER))
    with pytest.raises(TrustError, match="past"):
        take(folder, question)
    packed = aggregator.question(aggregator.head(FIRST, NAMES), b"others")
    with pytest.raises(MessageError, match="not the one that was signed"):
        Question.check(packed, made.peers)
    aggregator.signer = SigningKey.generate()
    with pytest.raises(TrustError):
        asked()
    for damaged in (b"", bytes(3), packed[:40], bytes(200)):
        with pytest.raises(NTKFLError):
            Question.check(damaged, made.peers)


# -- Once, whatever happens


def test_a_shuffler_killed_in_a_round_loses_nothing_and_releases_once(made: Federation) -> None:
    aggregator, members = begun(made)
    signed = aggregator.head(FIRST, NAMES)
    aggregator.shuffler.publish(signed)
    receipt = members[0].submit(signed, row(NAMES[0]))
    made.kill("shuffler")
    made.start("shuffler")
    assert members[0].submit(signed, row("again")) == receipt  # what was sent first counts
    for member, name in zip(members[1:], NAMES[1:], strict=True):
        member.submit(signed, row(name))
    first = opened(made, aggregator, signed)
    assert first == [name.encode().ljust(10) for name in NAMES]
    made.kill("shuffler")
    made.start("shuffler")
    assert opened(made, aggregator, signed) == first
    with refusal("late"):
        members[0].submit(signed, row("later"))
    aggregator.shuffler.forget(FIRST)
    with refusal("forgotten"):
        opened(made, aggregator, signed)


def test_a_shuffler_restored_from_a_copy_does_not_start(tmp_path: Path) -> None:
    """A second release, of one client more, would give that client's row by difference."""
    with federation(tmp_path, least=2) as made:
        aggregator, members = begun(made)
        signed = aggregator.head(FIRST, NAMES)
        aggregator.shuffler.publish(signed)
        members[0].submit(signed, row(NAMES[0]))
        members[1].submit(signed, row(NAMES[1]))
        made.kill("shuffler")
        state = made.folder / "shuffler" / f"run-{RUN}.sqlite"
        shutil.copy(state, tmp_path / "copy")
        made.start("shuffler")
        members[2].submit(signed, row(NAMES[2]))
        assert len(opened(made, aggregator, signed)) == 3
        made.kill("shuffler")
        shutil.copy(tmp_path / "copy", state)
        with pytest.raises(AssertionError, match="restored from a copy"):
            made.start("shuffler")
        state.unlink()
        with pytest.raises(AssertionError, match="has no database"):
            made.start("shuffler")


# -- Who asks


def test_requests_of_others_are_refused(made: Federation) -> None:
    aggregator, members = begun(made)
    signed = aggregator.head(FIRST, NAMES)
    aggregator.shuffler.publish(signed)
    path, url, folder = f"/v1/runs/{RUN}/hello", made.peers.shuffler.url, made.folder / "shuffler"
    own, other = members[0].identity, members[1].identity
    honest = signed_headers(own.issued, own.signing, "POST", path)
    for headers, body in [
        ({}, b""),
        (signed_headers(own.issued, other.signing, "POST", path), b""),  # another's name
        (signed_headers(own.issued, own.signing, "POST", path + "x"), b""),  # of another request
        (signed_headers(AGGREGATOR, own.signing, "POST", path), b""),
        (honest | {"ntkfl-credential": "?"}, b""),
    ]:
        assert raw(url, folder, "POST", path, body, headers=headers).status_code == 401
    assert raw(url, folder, "POST", path, b"", headers=honest).status_code == 200
    assert raw(url, folder, "POST", path, b"x" * 100, headers=honest).status_code == 413
    with refusal("not-client"):  # the aggregator is no client, and no client the aggregator
        aggregator.shuffler.http.ask("POST", path)
    with refusal("not-aggregator"):
        members[0].http.ask("POST", f"/v1/runs/{RUN}/1/0/release")
    with refusal("not-asked"):
        Member(add(made, "client-9")).submit(signed, row("stranger"))
    with refusal("unknown-run"):
        members[0].hello("another")
    with refusal("malformed"):
        members[0].send(b"damaged")


def add(made: Federation, name: str) -> Path:
    """One more client, as `ntkfl keys token` makes it."""
    from ntkfl.services.setup import add_client

    add_client(made.folder / "clients" / name, made.folder / "key-server", name)
    return made.folder / "clients" / name


def test_a_revoked_client_is_out_before_the_next_batch_opens(made: Federation) -> None:
    aggregator, members = begun(made)
    signed = aggregator.head(FIRST, NAMES)
    aggregator.shuffler.publish(signed)
    members[1].submit(signed, row(NAMES[1]))
    KeyServer(made.folder / "key-server").revoke("client-1")
    with refusal("strangers"):  # the list is fetched before a batch opens
        aggregator.shuffler.publish(aggregator.head(BatchKey(2, 0), NAMES))
    assert aggregator.shuffler.status(FIRST).clients == 0  # what it had sent is gone
    made.kill("key-server")
    made.kill("shuffler")
    made.start("shuffler")  # nobody answers: the last list holds
    with refusal("revoked"):
        members[1].submit(signed, row(NAMES[1]))
    with refusal("revoked"):
        members[1].hello()


def test_a_token_enrols_once(made: Federation) -> None:
    folder = add(made, "client-7")
    copy = made.folder / "clients" / "copy"
    shutil.copytree(folder, copy)
    first = Member(folder).identity
    assert Member(folder).identity.issued == first.issued
    with refusal("already-enrolled"):
        Member(copy)
    (copy / "token").write_text("client-7.guessed")
    with refusal("bad-token"):
        Member(copy)


# -- Denial


def test_callers_that_send_nothing_do_not_keep_others_out(made: Federation) -> None:
    """Three hundred anonymous ones announce an enrolment and are silent; no common allowance is theirs to hold."""
    import socket
    import ssl
    from urllib.parse import urlsplit

    context = ssl.create_default_context(cafile=str(made.folder / "shuffler" / "ca.pem"))
    at = urlsplit(made.peers.key_server.url)
    request = b"POST /v1/enrol HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n{"
    held = []
    try:
        for _ in range(300):
            plain = socket.create_connection((at.hostname, at.port), timeout=10)
            held.append(context.wrap_socket(plain, server_hostname=at.hostname))
            held[-1].sendall(request)
        assert Member(add(made, "client-8")).identity.name == "client-8"
        assert b" 408 " in held[0].recv(200)  # five seconds, and they are sent away
    finally:
        for connection in held:
            connection.close()


def test_a_disk_that_cannot_be_written_turns_ready_red_and_is_said_once(made: Federation) -> None:
    begun(made)
    url, folder, process = made.peers.shuffler.url, made.folder / "shuffler", made.processes["shuffler"]
    assert raw(url, folder, "GET", "/ready").status_code == 200
    limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    for _ in range(3):
        assert raw(url, folder, "GET", "/ready").status_code == 503
    assert raw(url, folder, "GET", "/health").status_code == 200
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
    assert raw(url, folder, "GET", "/ready").status_code == 200
    process.stop()
    assert sum("not ready" in line for line in process.err) == 1


def test_the_log_names_no_client(made: Federation) -> None:
    """The times at which a client sends would tell whose rows came between."""
    aggregator, members = begun(made)
    signed = aggregator.head(FIRST, NAMES)
    aggregator.shuffler.publish(signed)
    for member, name in zip(members, NAMES, strict=True):
        member.submit(signed, row(name))
    with pytest.raises(Refused):
        members[0].send(b"damaged")
    opened(made, aggregator, signed)
    process = made.processes["shuffler"]
    process.stop()
    assert not any(trace in line for line in process.err for trace in ("client-", "127.0.0.1"))
    assert "client-" not in process.output()
    assert any("released 3 rows of 3 clients" in line for line in process.err)


def test_rows_of_another_batch_or_size_are_refused(made: Federation) -> None:
    aggregator, members = begun(made)
    signed = aggregator.head(FIRST, NAMES)
    aggregator.shuffler.publish(signed)
    announced = Announced.of(FIRST, signed)
    with refusal("row-size"):
        members[0].send(pack_rows(announced, [bytes(20)]))
    with refusal("row-count"):
        members[0].send(pack_rows(announced, [b"a" * 20] * 2))
    with refusal("too-large"):
        members[0].send(bytes(1 << 20))
    with refusal("unknown-batch"):
        members[0].send(pack_rows(Announced(BatchKey(3, 0), bytes(32)), [bytes(58)]))
