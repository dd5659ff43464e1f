"""What rows cost on their way: top-k codes, seals, and the shuffler, for a round of the paper's CP-NTK-FL."""

from __future__ import annotations

import os

import torch

from ntkfl.wire.topk import decode_topk, encode_topk, topk_bytes
from ntkfl_experiments.bench.race import race
from ntkfl_experiments.bench.rows import BenchRow, Setting


def wire(setting: Setting) -> list[BenchRow]:
    """Coding, sealing and shuffling a round of top-k rows."""
    from ntkfl.crypto.hpke import SealingKey
    from ntkfl.crypto.row_frames import Announced, BatchKey, open_row, seal_rows  # sealing is an extra
    from ntkfl.services.announcement import Batch
    from ntkfl.services.store import BatchStore

    announced = Announced.of(key := BatchKey(1, 0), b"bench")
    N, n, k = (20, 2_111, 63) if setting.quick else (1200, 211_100, 6_333)
    positions = torch.arange(k).mul(n // k).repeat(N, 1)
    values = torch.randn(N, k, generator=torch.Generator().manual_seed(0))
    coded = encode_topk(values, positions, n)
    size, opener = topk_bytes(n, k), SealingKey.generate()
    plain = [os.urandom(size) for _ in range(N)]
    sealed = seal_rows(plain, opener.public, "bench", "bench", announced)
    names = tuple(f"client-{i}" for i in range(20))

    def shuffle() -> list[bytes]:
        shuffler, own = BatchStore(), N // len(names)
        shuffler.open(Batch(key, len(names), own, len(sealed[0]), len(names)), announced.digest)
        for i, name in enumerate(names):
            shuffler.submit(name, announced, sealed[i * own : (i + 1) * own])
        return shuffler.release(key).rows

    timed = race(
        {
            "encode": lambda: encode_topk(values, positions, n),
            "decode": lambda: decode_topk(coded, n, k),
            "seal": lambda: seal_rows(plain, opener.public, "bench", "bench", announced),
            "shuffle in memory": shuffle,
            "open": lambda: [open_row(opener, row, "bench", "bench", announced) for row in sealed],
        },
        turns=3,
        setting=setting,
    )
    note = f"{N:,} rows of {size:,} bytes"
    return [BenchRow(name, timing.seconds, note=note if name == "encode" else "") for name, timing in timed.items()]
