"""`wire/`: messages, Jacobians, top-k rows and quantised vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ntkfl
from ntkfl.privacy.sparsify import kept, sparsify
from ntkfl.wire import Message, join_rows, pack_jacobian, pack_topk, split_rows, unpack_jacobian, unpack_topk
from ntkfl.wire.message import pack_labels
from ntkfl.wire.quantize import decode_levels, encode_levels, quantize, top_level
from ntkfl.wire.topk import VALUES, encode_topk
from tests.fuzz.target import Target, unforgeable
from tests.fuzz.targets.twists import sealed_again, twisted

LIKE = torch.zeros(1)


def networks() -> dict[str, tuple[nn.Module, torch.Tensor, str]]:
    """A network, inputs and a form for every kind of block that travels."""
    return {
        "linear": (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(3, 4), "factored"),
        "dense": (nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 3)), torch.randn(2, 4), "dense"),
        "convolution": (
            nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)),
            torch.randn(2, 2, 4, 4),
            "factored",
        ),
        "normalisation": (
            nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)),
            torch.randn(2, 4),
            "auto",
        ),
        "embedding": (
            nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(9, 3)),
            torch.randint(0, 7, (2, 3)),
            "auto",
        ),
    }


def targets(scratch: Path) -> list[Target]:
    found = []
    uploads = {}
    for name, (model, x, form) in networks().items():
        J = ntkfl.jacobian(model, x, form=form)
        uploads[name] = Message("upload", 3, pack_jacobian(J)).encode()
        found.append(
            Target(f"jacobian {name}", (uploads[name],), _jacobian(J.shape[2]), sealed_again, twisted, share=1.5)
        )
    sparse, d = ntkfl.jacobian(*networks()["linear"][:2]), 43
    for values_as in VALUES:
        rows = sparsify(sparse, 0.8)
        data = Message("upload", 3, pack_topk(rows, values_as)).encode()
        found.append(Target(f"top-k {values_as}", (data,), _topk(d, values_as), sealed_again, twisted))
    messages = (*uploads.values(), *_others())
    found.append(unforgeable("message damaged", messages, Message.decode))
    found.append(Target("message forged", messages, _message, sealed_again, twisted, share=2))
    rows = tuple(row.encode() for row in split_rows(Message.decode(uploads["linear"])))
    found.append(Target("rows joined", rows, _joined(rows), sealed_again, twisted))
    return [*found, *(_levels(bits) for bits in (2, 8))]


def _others() -> tuple[bytes, ...]:
    labels = pack_labels(torch.tensor([1, 2, 0]), 3)
    return (
        Message("weights", 0, {}).encode(),
        Message("upload", 2**32 - 1, {"labels": labels, "f": torch.randn(2, 0, 3)}).encode(),
        Message("losses", 1, {"samples": torch.tensor(5, dtype=torch.int32), "h": torch.randn(3).half()}).encode(),
    )


def _message(data: bytes) -> None:
    message = Message.decode(data)
    assert message.encode() == data, "what was read is not what was written"
    for name in message.arrays:
        message.take(name)


def _jacobian(columns: int) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        J = unpack_jacobian(Message.decode(data), 3, columns, LIKE)
        assert J.shape == (len(J), 3, columns)
        assert J.jvp(torch.ones(columns)).shape == (len(J), 3)
        assert J.vjp(torch.ones(len(J), 3)).shape == (columns,)
        assert J.kernel().shape == (len(J), len(J))

    return check


def _topk(columns: int, values_as: str) -> Callable[[bytes], None]:
    k = kept(0.8, 3 * columns)

    def check(data: bytes) -> None:
        message = Message.decode(data)
        J = unpack_topk(message, 3, columns, k, values_as, LIKE)
        block = J.blocks[0]
        assert bool(block.values.isfinite().all())
        assert block.values.shape == block.positions.shape == (len(J), k)
        assert bool((block.positions.diff(dim=1) > 0).all())
        again = encode_topk(block.values, block.positions, 3 * columns, values_as)
        assert torch.equal(again["positions"], message.arrays["topk.positions"])
        assert J.jvp(torch.ones(columns)).shape == (len(J), 3)

    return check


def _joined(rows: tuple[bytes, ...]) -> Callable[[bytes], None]:
    honest = [Message.decode(row) for row in rows]

    def check(data: bytes) -> None:
        joined = join_rows([honest[0], Message.decode(data), honest[1]])
        assert next(row.encode() for row in split_rows(joined)) == rows[0]

    return check


def _levels(bits: int) -> Target:
    sizes = (1, 33, 300)
    vectors = [torch.randn(n) * (torch.rand(n) < 0.3) for n in sizes]
    levels = [quantize(v, bits, np.random.default_rng(0).random)[0] for v in vectors]
    seeds = tuple(bytes([i]) + encode_levels(own, bits).tobytes() for i, own in enumerate(levels))

    def check(data: bytes) -> None:
        n = sizes[data[0] % len(sizes)] if data else 1
        found = decode_levels(np.frombuffer(data, np.uint8)[1:], n, bits)
        assert found.shape == (n,)
        assert int(np.abs(found).max()) <= top_level(bits)
        assert encode_levels(found, bits).tobytes() == data[1:]

    return Target(f"levels of {bits} bits", seeds, check)
