"""A receipt: the shuffler's word that a client's rows for one exchange are with it. 64 bytes, a signature.

It names the federation, the run and the exchange, and nothing of the rows: no count, no time, no hash, not even the
client. All receipts of an exchange are the same bytes, so that whoever carries them learns only that there was one.
"""

from __future__ import annotations

from ntkfl.privacy.rows import BatchKey
from ntkfl.privacy.sealing import SigningKey, bind, verify

_RECEIPT = "ntkfl receipt v1"


def issue_receipt(signer: SigningKey, federation: str, run: str, key: BatchKey) -> bytes:
    return signer.sign(bind(_RECEIPT, *key.check()), bind(_RECEIPT, federation, run))


def check_receipt(receipt: bytes, shuffler: bytes, federation: str, run: str, key: BatchKey) -> None:
    """`TrustError` unless the shuffler issued it for this exchange."""
    verify(shuffler, receipt, bind(_RECEIPT, *key.check()), bind(_RECEIPT, federation, run))
