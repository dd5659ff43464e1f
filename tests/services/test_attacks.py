"""An aggregator with true keys that cheats, and others who try: real services, asked over TLS on loopback."""

from __future__ import annotations

import gzip
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ntkfl.crypto.hpke import SigningKey
from ntkfl.crypto.row_frames import Announced, BatchKey, open_row
from ntkfl.crypto.signed import AGGREGATOR, Credential
from ntkfl.errors import NTKFLError, Refused, TrustError
from ntkfl.federation.policy import Terms
from ntkfl.flower import Shuffler
from ntkfl.methods import Privacy, SumNTKFL
from ntkfl.services import setup
from ntkfl.services.announcement import Head, Question
from ntkfl.services.clients import HttpClient
from ntkfl.services.key_server import KeyServer
from ntkfl.services.peers import RoundTerms
from ntkfl.wire import Message
from tests.fork_server import run
from tests.services.federation import (
    RUN,
    TERMS,
    Aggregator,
    Federation,
    Member,
    federation,
    raw,
    refusal,
    signed_headers,
)

FIRST = BatchKey(1, 0)
NAMES = ("client-0", "client-1", "client-2")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Federation]:
    with federation(tmp_path) as found:
        yield found


def begun(made: Federation) -> tuple[Aggregator, list[Member]]:
    """A run, and clients of it."""
    aggregator, members = made.aggregator, [made.client(name) for name in NAMES]
    aggregator.shuffler.begin(TERMS)
    return aggregator, members


def asked(made: Federation) -> tuple[Aggregator, list[Member], bytes]:
    """A run with an open batch, and its signed head."""
    aggregator, members = begun(made)
    signed = aggregator.head(FIRST)
    aggregator.shuffler.publish(signed)
    return aggregator, members, signed


def row(name: str) -> list[bytes]:
    return [name.encode().ljust(10)]


def opened(made: Federation, aggregator: Aggregator, signed: bytes) -> list[bytes]:
    """What the shuffler releases, sorted."""
    announced = Announced.of(FIRST, signed)
    batch = Head.check(signed, made.peers).batch
    rows, _ = aggregator.shuffler.release(announced, batch)
    return sorted(open_row(aggregator.opener, one, made.peers.federation, RUN, announced) for one in rows)


# -- Who is asked


def test_rounds_ask_as_many_as_agreed_and_enrolled_clients_are_all_in_them_or_none(made: Federation) -> None:
    """With a ghost beside two true clients, the difference to a round of three would be the third's sum. Flower carries
    the questions, so the aggregator decides who hears one.
    """
    aggregator, members = begun(made)
    for clients in (2, 4):
        with refusal("terms"):
            aggregator.shuffler.publish(aggregator.head(FIRST, clients=clients, min_clients=2))
    with refusal("below-floor"):
        aggregator.shuffler.publish(aggregator.head(FIRST, min_clients=2))
    signed = aggregator.head(FIRST)
    aggregator.shuffler.publish(signed)
    for member, name in zip(members[:2], NAMES, strict=False):
        member.submit(signed, row(name))
    true, ghost = members[2].http.signs, SigningKey.generate()
    forged = Credential(made.peers.federation, "ghost", ghost.public.hex(), ghost.public.hex()).issue(aggregator.signer)
    members[2].http.signs = forged, ghost
    with refusal("unauthenticated"):
        members[2].submit(signed, row("ghost"))
    with refusal("not-ready"):
        opened(made, aggregator, signed)
    members[2].http.signs = true
    members[2].submit(signed, row(NAMES[2]))
    assert opened(made, aggregator, signed) == [name.encode().ljust(10) for name in NAMES]


# -- What is asked


def test_all_clients_answer_one_question_under_one_set_of_terms(made: Federation) -> None:
    aggregator, members = begun(made)
    signed, other = aggregator.head(FIRST), aggregator.head(FIRST, b"other weights")
    aggregator.shuffler.publish(signed)
    with refusal("other-announcement"):
        aggregator.shuffler.publish(other)
    with refusal("other-announcement"):  # a client that was asked another thing
        members[0].submit(other, row("client-0"))
    with refusal("other-terms"):
        aggregator.shuffler.publish(aggregator.head(BatchKey(2, 0), terms="cd" * 32))
    with refusal("other-terms"):
        aggregator.shuffler.begin("cd" * 32)
    with refusal("malformed"):  # not the aggregator's
        aggregator.shuffler.publish(bytes(64) + signed[64:])


def test_a_client_checks_before_it_answers(made: Federation) -> None:
    aggregator, terms = made.aggregator, Terms.of(SumNTKFL(), Privacy(), rounds=1, outputs=1, inputs=(1,))
    client, message = Shuffler(made.folder / "clients" / "client-0"), Message("weights", 1, {}).encode()

    def heed(run: str = RUN, said: bytes = message, **changes: object) -> Message:
        signed = aggregator.head(FIRST, message, terms=terms.digest, **changes)
        return client.heed(Question.pack(signed, said), run, terms)

    assert heed().kind == "weights"
    for changes, why in [
        ({"run": "another"}, "another run"),
        ({"clients": 4}, "asks 4 clients"),
        ({"min_clients": 2}, "released with 2"),
        ({"said": b"others"}, "not the one that was signed"),
    ]:
        with pytest.raises(NTKFLError, match=why):
            heed(**changes)  # type: ignore[arg-type]
    aggregator.signer = SigningKey.generate()
    with pytest.raises(TrustError, match="signature"):
        heed()
    for damaged in (b"", bytes(3), bytes(40), bytes(200)):
        with pytest.raises(NTKFLError):
            Question.check(damaged, made.peers)


# -- Once, whatever happens


def test_a_shuffler_killed_in_a_round_loses_nothing_and_releases_once(made: Federation) -> None:
    aggregator, members, signed = asked(made)
    receipt = members[0].submit(signed, row(NAMES[0]))
    made.kill("shuffler")
    made.start("shuffler")
    assert members[0].submit(signed, row("again")) == receipt  # what was sent first counts
    for member, name in zip(members[1:], NAMES[1:], strict=True):
        member.submit(signed, row(name))
    for _ in range(2):
        assert opened(made, aggregator, signed) == [name.encode().ljust(10) for name in NAMES]
        made.kill("shuffler")
        made.start("shuffler")
    aggregator.shuffler.discard(FIRST)
    with refusal("late"):
        opened(made, aggregator, signed)


# -- Who asks


def test_what_may_pass_by_itself_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """For supervisors: a port that is taken is tried again, a folder that is none is not."""
    setup.init(tmp_path / "made", NAMES, RoundTerms(clients=3, least=3))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, codes = str(taken.getsockname()[1]), []
        for folder in (tmp_path / "made" / "shuffler", tmp_path / "absent"):
            codes.append(run("-m", "ntkfl", "serve", "shuffler", folder, "--port", port).returncode)
    assert codes == [75, 2]


def test_requests_of_others_are_refused(made: Federation) -> None:
    aggregator, members, _ = asked(made)
    path, url, folder = f"/v1/runs/{RUN}/rows", made.peers.shuffler.url, made.folder / "shuffler"
    own, other = members[0].identity, members[1].identity
    honest = signed_headers(own.issued, own.signing, "POST", path)
    for headers, body in [
        ({}, b""),
        (signed_headers(own.issued, other.signing, "POST", path), b""),  # another's name
        (signed_headers(own.issued, own.signing, "POST", path + "x"), b""),  # of another request
        (signed_headers(AGGREGATOR, own.signing, "POST", path), b""),
        (
            {"authorization": honest["authorization"].replace(own.issued, other.issued)},
            b"",
        ),  # what is signed names the credential
    ]:
        assert raw(url, folder, "POST", path, body, headers=headers).status_code == 401
    assert raw(url, folder, "POST", path, b"", headers=honest).status_code == 409  # no rows are in it
    assert raw(url, folder, "POST", path, b"x" * 100, headers=honest).status_code == 401
    assert raw(url, folder, "POST", path, b"x" * (1 << 20), headers=honest).status_code == 413
    with refusal("not-client"):  # the aggregator is no client, and no client the aggregator
        aggregator.shuffler.http.ask("POST", path)
    with refusal("not-aggregator"):
        members[0].http.ask("POST", f"/v1/runs/{RUN}/1/0")
    with refusal("unknown-run"):
        members[0].send(b"", "another")
    with refusal("malformed"):
        members[0].send(b"damaged")


def test_a_revoked_client_is_out_before_the_next_batch_opens(made: Federation) -> None:
    aggregator, members = begun(made)
    KeyServer(made.folder / "key-server").revoke("client-1")
    signed = aggregator.head(FIRST)
    aggregator.shuffler.publish(signed)
    made.kill("shuffler")
    made.kill("key-server")
    made.start("shuffler")
    with refusal("revoked"):  # it is on the disk
        members[1].submit(signed, row(NAMES[1]))
    aggregator.shuffler.http.patience = 0
    with refusal("busy"):  # nothing opens while nobody knows who is revoked
        aggregator.shuffler.publish(aggregator.head(BatchKey(2, 0)))


# -- Denial


@pytest.mark.parametrize(("status", "encoding"), [(200, "identity"), (409, "gzip")])
def test_a_service_that_never_stops_answering_fills_nobodys_memory(tmp_path: Path, status: int, encoding: str) -> None:
    (tmp_path / "ca.pem").write_bytes(setup.self_signed("s", "127.0.0.1:1")[0])
    client, sent = HttpClient("https://127.0.0.1:1", tmp_path), []
    piece = bytes(1 << 16) if encoding == "identity" else gzip.compress(bytes(1 << 24))

    def endless() -> Iterator[bytes]:
        while True:
            sent.append(len(piece))
            assert sum(sent) < 1 << 22
            yield piece

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        return httpx.Response(status, headers={"content-encoding": encoding}, content=endless())

    client._http = httpx.Client(
        base_url=client.url, headers=client._http.headers, transport=httpx.MockTransport(answer)
    )
    with refusal("too-large"):
        client.ask("GET", "/")


def test_callers_that_send_nothing_do_not_keep_others_out(made: Federation) -> None:
    """Three hundred anonymous ones announce a body and are silent; none of it is waited for."""
    context = ssl.create_default_context(cafile=str(made.folder / "shuffler" / "ca.pem"))
    at = urlsplit(made.peers.key_server.url)
    request = b"POST /v1/runs/run-1/secret HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n{"
    held = []
    try:
        for _ in range(300):
            plain = socket.create_connection((at.hostname, at.port), timeout=10)
            held.append(context.wrap_socket(plain, server_hostname=at.hostname))
            held[-1].sendall(request)
        assert len(made.client("client-0").identity.run_secret(RUN).seed.reveal()) == 32
        assert b" 401 " in held[0].recv(200)
    finally:
        for connection in held:
            connection.close()


def test_the_log_names_no_client(made: Federation) -> None:
    """The times at which a client sends would tell whose rows came between."""
    aggregator, members, signed = asked(made)
    for member, name in zip(members, NAMES, strict=True):
        member.submit(signed, row(name))
    with pytest.raises(Refused):
        members[0].send(b"damaged")
    opened(made, aggregator, signed)
    for connected in (aggregator.shuffler, *members):
        connected.http._http.close()  # or it is waited for
    process = made.processes["shuffler"]
    process.stop()
    said = process.output()
    assert "client-" not in said
    assert not any("127.0.0.1" in line for line in said.splitlines() if not line.startswith("listening"))
    assert "released 3 rows" in said
