"""`data/`: files of datasets and of a client's own data."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import torch

from ntkfl.data import cifar, femnist
from ntkfl.data.client import read_own
from ntkfl.data.files import from_file
from ntkfl.data.folders import Images
from ntkfl.data.npz import read_client
from tests.fuzz.target import Target

_LEAF_WORDS = (
    b'"user_data"',
    b'"users"',
    b'"x"',
    b'"y"',
    b"[]",
    b"{}",
    b"null",
    b"1e999",
    b"NaN",
    b"9223372036854775808",
)


def targets(scratch: Path) -> list[Target]:
    return [*_npz(scratch), *_tables(scratch), *_leaf(scratch), *_cifar(scratch), *_pictures(scratch)]


def _file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    path.parent.mkdir(parents=True, exist_ok=True)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return check


def _saved(save: Callable[..., None], **arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    save(stream, **arrays)
    return stream.getvalue()


def _npz(scratch: Path) -> list[Target]:
    x, y = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), np.array([0, 1, 2])
    seeds = (
        _saved(np.savez, x=x, y=y),
        _saved(np.savez_compressed, x=x.astype(">f8"), y=x),
        _saved(np.savez, x=np.asfortranarray(x.astype(np.float16)), y=y.astype(np.uint8)),
    )
    words = (
        b"'descr': '<f8'",
        b"'descr': '|O'",
        b"(3, 4)",
        b"(-3, -4)",
        b"(0,)",
        b"'fortran_order': True",
        b"x.npy",
        b"y.npy",
    )

    def client(path: Path) -> None:
        x, y = read_client(path)
        assert len(x) == len(y) > 0
        assert bool(x.isfinite().all())

    digits = _saved(
        np.savez, images=np.zeros((3, 28, 28), np.uint8), labels=np.array([1, 2, 3], np.uint8),
        writer=np.array([5, 5, 6]), split=np.array([0, 0, 1], np.uint8),
    )  # fmt: skip

    def written(path: Path) -> None:
        arrays = femnist.read_digits(path)
        assert len(arrays.images) == len(arrays.labels) == len(arrays.writers)  # type: ignore[arg-type]

    return [
        Target("npz", seeds, _file(scratch / "client.npz", client), repair=_zip_checksums, words=words, share=2),
        Target("npz digits", (digits,), _file(scratch / "digits.npz", written), repair=_zip_checksums, words=words),
    ]


def _tables(scratch: Path) -> list[Target]:
    """Files of many clients: a table, and an archive."""
    x, y = np.linspace(0, 1, 24, dtype=np.float32).reshape(6, 4), np.arange(6) % 2
    rows = "".join(f"{i},{i}.5,{i % 2},site-{i % 3},{'test' if i > 3 else 'train'}\n" for i in range(6))
    csv = ("a,b,label,client,split\n" + rows).encode()
    real = b"a,label\n" + b"".join(b"%d,%d.5\n" % (i, i) for i in range(6))
    words = (
        b",",
        b"\n",
        b'"',
        b"label",
        b"client",
        b"split",
        b"nan",
        b"1e999",
        b"-1",
        b"\xff",
        b"\x00",
        b"train",
        b"99999999999",
    )
    plain, whole = _saved(np.savez, x=x, y=y), _saved(np.savez, x=x, y=y, client=y, test_x=x[:2], test_y=y[:2])

    def read(path: Path) -> None:
        dataset = from_file(path)
        assert len(dataset) > 0
        assert bool(dataset.rows.x.isfinite().all())
        assert dataset.classes is None or int(dataset.rows.y.max()) < dataset.classes

    return [
        Target("csv", (csv, real), _file(scratch / "table.csv", read), words=words),
        Target("npz of clients", (plain, whole), _file(scratch / "table.npz", read), repair=_zip_checksums),
    ]


def _zip_checksums(data: bytes) -> bytes:
    """With the CRC-32 of stored members made right in both places, so that a change gets past it."""
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [m for m in archive.infolist() if m.compress_type == zipfile.ZIP_STORED]
    except Exception:
        return data
    out = bytearray(data)
    for member in members:
        at = member.header_offset
        start = (
            at
            + 30
            + int.from_bytes(data[at + 26 : at + 28], "little")
            + int.from_bytes(data[at + 28 : at + 30], "little")
        )
        old, new = (
            member.CRC.to_bytes(4, "little"),
            zlib.crc32(data[start : start + member.file_size]).to_bytes(4, "little"),
        )
        out = out.replace(old, new) if member.CRC else out
    return bytes(out)


def _leaf(scratch: Path) -> list[Target]:
    pixels = [0.5] * 784
    content = {"users": ["a", "b"], "user_data": {"a": {"x": [pixels], "y": [3]}, "b": {"x": [], "y": []}}}
    seed = json.dumps(content).encode()

    def twist(rng: Random, data: bytes) -> bytes:
        """Something in the document replaced, which stays a document."""
        try:
            document = json.loads(data)
            holder, key = rng.choice(
                [(document, "users"), (document, "user_data"), (document["user_data"], "a"),
                 (document["user_data"]["a"], "x"), (document["user_data"]["a"], "y")]
            )  # fmt: skip
            holder[key] = rng.choice(
                [
                    3,
                    None,
                    "a",
                    [],
                    {},
                    [[]],
                    [[1] * 784],
                    [5, 6],
                    2**63,
                    [2**63],
                    [1.5],
                    ["a"],
                    [["b"] * 784],
                    [[3] * 784] * 2,
                ]
            )
            return json.dumps(document).encode()
        except (ValueError, KeyError, TypeError, RecursionError):
            return data

    def read(path: Path) -> None:
        images, labels, writers = femnist._read_leaf([path])
        assert images.shape == (len(labels), 1, 28, 28)
        assert len(writers) == len(labels)
        assert labels.min() >= 0
        assert labels.max() < 10

    return [Target("leaf", (seed,), _file(scratch / "leaf.json", read), twist=twist, words=_LEAF_WORDS)]


def _cifar(scratch: Path) -> list[Target]:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name in cifar.BATCHES:
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = 3073
            archive.addfile(info, io.BytesIO(bytes(3073)))
    x, y = np.zeros((5, 32, 32, 3), np.uint8), np.arange(5, dtype=np.uint8)
    arrays = _saved(np.savez_compressed, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])

    def tar(path: Path) -> None:
        assert [batch.shape for batch in cifar.read_archive(path, rows=1)] == [(1, 3073)] * 6

    def npz(path: Path) -> None:
        assert [batch.shape for batch in cifar.read_npz_batches(path, rows=1)] == [(1, 3073)] * 6

    def recompress(data: bytes) -> bytes:
        """Changes are made to the tar inside."""
        return gzip.compress(data, 1)

    def recompressed(data: bytes) -> None:
        _file(scratch / "inside.tar.gz", tar)(data)

    plain = gzip.decompress(stream.getvalue())
    return [
        Target("cifar archive", (stream.getvalue(),), _file(scratch / "cifar.tar.gz", tar), share=0.5),
        Target(
            "cifar tar", (plain,), lambda data: recompressed(recompress(data)), share=0.5,
            words=(b"ustar", b"data_batch_1.bin", b"\x80\0\0\0\0\0\0\0\x7f\xff\xff\xff", b"S", b"x", b"L"),
        ),
        Target("cifar npz", (arrays,), _file(scratch / "cifar.npz", npz), share=0.5),
    ]  # fmt: skip


def _pictures(scratch: Path) -> list[Target]:
    from PIL import Image

    found = []
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    for suffix, kind in (
        ("png", "PNG"),
        ("jpg", "JPEG"),
        ("gif", "GIF"),
        ("bmp", "BMP"),
        ("webp", "WEBP"),
        ("ppm", "PPM"),
    ):
        stream = io.BytesIO()
        noise.save(stream, kind)

        def read(path: Path) -> None:
            x, y = read_own(str(path.parent.parent), Images((3, 8, 8)), lambda name: dict)
            assert x.shape == (1, 3, 8, 8)
            assert y.tolist() == [1]
            assert bool((x >= 0).all())
            assert bool((x <= 1).all())

        path = scratch / suffix / "1" / f"picture.{suffix}"
        found.append(
            Target(
                f"picture {suffix}",
                (stream.getvalue(),),
                _file(path, read),
                repair=_png if suffix == "png" else None,
                share=0.5,
            )
        )
    return found


def _png(data: bytes) -> bytes:
    """With every chunk's CRC-32 made right."""
    import zlib

    out, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        body = data[at + 4 : at + 8 + size]
        out += data[at : at + 4] + body + zlib.crc32(body).to_bytes(4, "big")
        at += 12 + size
    return bytes(out) + data[at:]


_ = torch
