"""A receipt: the shuffler's signature that it holds a client's rows for one announcement. 64 bytes.

It names the federation, the run, the exchange and the announcement's digest, and nothing of the rows: no count, no
time, no hash, not even the client. All receipts of an exchange are the same bytes, so that a carrier learns only
that there was one.
"""

from __future__ import annotations

from ntkfl.crypto.context import bind
from ntkfl.crypto.hpke import SigningKey, verify
from ntkfl.crypto.row_frames import Announced

_RECEIPT = "ntkfl receipt v2"


def issue_receipt(signer: SigningKey, federation: str, run: str, announced: Announced) -> bytes:
    return signer.sign(_payload(announced), bind(_RECEIPT, federation, run))


def check_receipt(receipt: bytes, shuffler: bytes, federation: str, run: str, announced: Announced) -> None:
    """`TrustError` unless the shuffler issued it for this announcement."""
    verify(shuffler, receipt, _payload(announced), bind(_RECEIPT, federation, run))


def _payload(announced: Announced) -> bytes:
    key, digest = announced.check()
    return bind(_RECEIPT, *key, digest)
