"""What the package sends, read by a second implementation that shares no code with it (`decoder.py`).

`vectors.json` holds bytes as version 2 of the protocol has them, with the keys to read them. It is never made anew: a
protocol that reads it no longer is another version.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag

from ntkfl.crypto.hpke import SealingKey, SigningKey
from ntkfl.crypto.masking import pack_words
from ntkfl.crypto.row_frames import Announced, BatchKey, pack_rows, seal_rows
from ntkfl.crypto.signed import issue_receipt
from ntkfl.federation.secure_sum import mask_reply
from ntkfl.services.announcement import Batch, Head, Question
from tests.crypto import decoder
from tests.federation.masked import words_of

FEDERATION, RUN = "hospitals", "run-7"
ROWS, MESSAGE, VECTORS = [b"first row.", b"second row"], b"a message", [[1, -2, 3], [10, 20, -30]]
FILE = Path(__file__).parent / "vectors.json"


def private_of(key: Any) -> bytes:
    raw: bytes = key._key.private_bytes_raw()
    return raw


def made() -> dict[str, Any]:
    """Fresh bytes of every kind, in hexadecimal."""
    opener, aggregator, shuffler = SealingKey.generate(), SigningKey.generate(), SigningKey.generate()

    def question(exchange: int, numbers: int) -> tuple[bytes, Announced]:
        size = 48 + (4 * numbers or len(ROWS[0]))
        batch = Batch(BatchKey(3, exchange), 2, 1 if numbers else len(ROWS), size, 2, numbers)
        head = Head(RUN, batch, opener.public.hex(), "ab" * 32, hashlib.sha256(MESSAGE).hexdigest())
        signed = head.sign(aggregator, FEDERATION)
        return Question.pack(signed, MESSAGE), Announced.of(batch.key, signed)

    (rows, answered), (sums, summed) = question(0, 0), question(1, 3)
    return {
        "opener": private_of(opener).hex(),
        "aggregator": aggregator.public.hex(),
        "shuffler": shuffler.public.hex(),
        "rows question": rows.hex(),
        "rows": pack_rows(answered, seal_rows(ROWS, opener.public, FEDERATION, RUN, answered)).hex(),
        "rows receipt": issue_receipt(shuffler, FEDERATION, RUN, answered).hex(),
        "sums question": sums.hex(),
        "sums": [mask_reply(words_of(v), opener.public, FEDERATION, RUN, summed).hex() for v in VECTORS],
        "sums receipt": issue_receipt(shuffler, FEDERATION, RUN, summed).hex(),
    }


def read(name: str, vectors: dict[str, Any]) -> decoder.Announcement:
    said, message = decoder.read_question(
        bytes.fromhex(vectors[f"{name} question"]), bytes.fromhex(vectors["aggregator"]), FEDERATION
    )
    assert message == MESSAGE
    assert said.head["run"] == RUN
    return said


@pytest.fixture(params=["kept", "fresh"])
def vectors(request: pytest.FixtureRequest) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(FILE.read_text())
    return kept if request.param == "kept" else made()


def test_sealed_rows_open(vectors: dict[str, Any]) -> None:
    said, frame, key = read("rows", vectors), bytes.fromhex(vectors["rows"]), bytes.fromhex(vectors["opener"])
    assert decoder.read_rows(frame, key, FEDERATION, RUN, said) == ROWS
    with pytest.raises(InvalidTag):
        decoder.read_rows(frame, key, FEDERATION, "run-8", said)
    with pytest.raises(decoder.Wrong, match="damaged"):
        decoder.read_frame(frame[:60] + bytes([frame[60] ^ 1]) + frame[61:])
    with pytest.raises(decoder.Wrong, match="another announcement"):
        decoder.read_rows(frame, key, FEDERATION, RUN, read("sums", vectors))


def test_masked_vectors_add_up_to_the_sum_and_are_nothing_alone(vectors: dict[str, Any]) -> None:
    said, key = read("sums", vectors), bytes.fromhex(vectors["opener"])
    bodies = [bytes.fromhex(body) for body in vectors["sums"]]
    assert decoder.read_total(bodies, key, FEDERATION, RUN, said) == [11, 18, -27]
    for body, vector in zip(bodies, VECTORS, strict=True):
        (masked,) = decoder.read_rows(body[32:], key, FEDERATION, RUN, said)
        assert masked != pack_words(words_of(vector))


def test_receipts_are_the_shufflers_for_one_announcement(vectors: dict[str, Any]) -> None:
    rows, sums, shuffler = read("rows", vectors), read("sums", vectors), bytes.fromhex(vectors["shuffler"])
    receipt = bytes.fromhex(vectors["rows receipt"])
    decoder.check_receipt(receipt, shuffler, FEDERATION, RUN, rows)
    decoder.check_receipt(bytes.fromhex(vectors["sums receipt"]), shuffler, FEDERATION, RUN, sums)
    for federation, run, said in (("others", RUN, rows), (FEDERATION, "run-8", rows), (FEDERATION, RUN, sums)):
        with pytest.raises(InvalidSignature):
            decoder.check_receipt(receipt, shuffler, federation, run, said)


def test_the_decoder_shares_no_code_with_the_package() -> None:
    text = Path(decoder.__file__).read_text()
    roots = set(re.findall(r"^\s*(?:from|import) (\w*)", text, re.MULTILINE))
    assert not roots & {"ntkfl", "ntkfl_experiments", "tests", "numpy", "torch", ""}
    assert len(text.splitlines()) <= 300
