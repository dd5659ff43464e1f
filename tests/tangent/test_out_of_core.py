"""Rows out of core: every product is the in-memory Jacobian's, and a file is gone with the rows that were in it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.tangent import Stack, stacking
from ntkfl.tangent.jacobian import BlockJacobian
from ntkfl.tangent.stacking import StackedJacobian

EXACT = 1e-12  # float64, sums of a few hundred numbers of order one in another order


def pair(rows: int = 4) -> tuple[BlockJacobian, StackedJacobian]:
    """A Jacobian, and its rows in parts of so many."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()  # fmt: skip
    J = ntkfl.jacobian(model, torch.randn(11, 1, 6, 6, dtype=torch.float64))
    assert isinstance(J, BlockJacobian)
    return J, parted(J, rows)


def parted(J: BlockJacobian, rows: int) -> StackedJacobian:
    return StackedJacobian([J[at : at + rows] for at in range(0, len(J), rows)])


def products(J: ntkfl.Jacobian, which: slice | list[int] = slice(None)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    delta = torch.randn(2, J.shape[2], dtype=torch.float64, generator=generator)
    R = torch.randn(2, 11, 3, dtype=torch.float64, generator=generator)[:, which]
    found = [J.jvp(delta), J.vjp(R), J.product(R[0]), J.kernel(), J.kernel_product(R[0]), J.norms(), J.dense()]
    return [t.cpu() for t in found]


def same(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all((a - b).norm() <= EXACT * b.norm() for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_products_equal_the_rows_in_memory(rows: int) -> None:
    J, streamed = pair(rows)
    assert same(products(streamed), products(J))


def test_changed_rows_equal_too() -> None:
    J, streamed = pair()
    factors, other = torch.rand(11, dtype=torch.float64), torch.rand(11, dtype=torch.float64)
    assert same(products(streamed.scaled(factors).scaled(other)), products(J.scaled(factors).scaled(other)))
    some = [9, 2, 2, 0]
    assert same(products(streamed.scaled(factors)[some], some), products(J.scaled(factors)[some], some))
    assert same([streamed[3:8].gram(J), J.gram(streamed)], [J[3:8].gram(J), J.gram(J)])
    assert torch.equal(ntkfl.concatenate([streamed, J]).dense(), ntkfl.concatenate([J, J]).dense())


def test_precision_is_that_of_the_products_not_of_the_store() -> None:
    J, _ = pair()
    single = parted(J.to(torch.float32), 4)
    again = single.double()
    assert (single.dtype, again.dtype, again.stored[0].dtype) == (torch.float32, torch.float64, torch.float32)
    assert same(products(again), products(J.to(torch.float32).double()))


@pytest.mark.parametrize("kernel", ["full", "trace"])
def test_an_evolution_equals_the_one_in_memory(kernel: str) -> None:
    J, streamed = pair()
    f0, y = torch.zeros(11, 3, dtype=torch.float64), torch.arange(11) % 3
    ours, expected = (ntkfl.evolve(rows, f0, y, 0.05, [10, 200], kernel=kernel, rtol=1e-6) for rows in (streamed, J))
    assert same(
        [ours.residuals, ours.deltas(), ours.outputs], [expected.residuals, expected.deltas(), expected.outputs]
    )


def test_a_stack_in_a_folder_leaves_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "PART_BYTES", 2**12)
    J, _ = pair()
    stack = Stack(20, store=tmp_path)
    for part in (J[:5], J[5:11]):
        stack.add(part)
    whole = stack.whole()
    assert isinstance(whole, StackedJacobian)
    assert len(whole.stored) > 1
    assert list(tmp_path.iterdir()) == []  # a killed process leaves nothing behind either
    assert same(products(whole), products(J))
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    mapped = [line for line in maps.read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == len(J.tensors())
    del stack, whole
    gc.collect()
    assert str(tmp_path) not in maps.read_text()


def test_a_folder_may_be_given_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows lie in files whatever type the name has."""
    J, _ = pair()
    made = []
    monkeypatch.setattr(
        stacking, "mapped_file", lambda shape, dtype, folder: made.append(folder) or torch.empty(shape, dtype=dtype)
    )
    for store in (str(tmp_path), tmp_path):
        made.clear()
        stack = Stack(11, store=store)
        stack.add(J)
        assert set(made) == {tmp_path}
        assert same(products(stack.whole()), products(J))


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        for store in (tmp_path / name, str(tmp_path / name)):
            with pytest.raises(ConfigError, match=f"there is no folder .*{name} for the rows: make it first"):
                Stack(11, store=store)
    with pytest.raises(ConfigError, match="store must be a folder or None, not 3"):
        Stack(11, store=3)  # type: ignore[arg-type]


def test_forms_may_differ_in_a_folder(tmp_path: Path) -> None:
    J, _ = pair()
    dense = BlockJacobian([block.densify() if hasattr(block, "densify") else block for block in J.blocks], *J.shape[1:])
    stack = Stack(22, store=tmp_path)
    for part in (J, dense):
        stack.add(part)
    whole = stack.whole()
    assert isinstance(whole, StackedJacobian)
    assert same([whole[:11].dense(), whole[11:].dense()], [J.dense(), dense.dense()])
