"""Sketches of large factors: what they keep, by how much they err, and that the flow follows them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ntkfl.tangent import Flow, Sums, plan_jacobian
from ntkfl.tangent.curvature import curvature_sums
from ntkfl.tangent.flow import Eigen, eigen
from ntkfl.tangent.sums import SKETCH, Factor, probe_matrix, sketch_rank
from ntkfl.wire import Message
from tests.tangent.test_curvature import made_up, sketch, sums

ONE = torch.tensor(1.0, dtype=torch.float64)
SIGNS = [[-1, 1, -1, -1, -1, 1, -1, 1], [1, -1, 1, -1, 1, -1, -1, 1], [1, -1, -1, 1, -1, 1, 1, 1]]
POSITIVE = [2, 131161, 261659]


def orthogonal(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q


def with_spectrum(values: Tensor) -> Tensor:
    """A symmetric matrix [1, n, n] with these eigenvalues."""
    Q = orthogonal(len(values))
    return (Q @ values.diag() @ Q.T).unsqueeze(0)


def dense(own: Eigen) -> Tensor:
    """U diag(λ) Uᵀ, and τ (I − U Uᵀ) beside it: [groups, n, n]."""
    if own.vectors is None:
        return torch.diag_embed(own.values)
    U = own.vectors
    r = U.shape[2]
    along = U @ torch.diag_embed(own.values[:, :r]) @ U.mT
    if not own.partial:
        return along
    return along + own.values[:, -1, None, None] * (torch.eye(own.size).to(U) - U @ U.mT)


def shift_of(A: Tensor) -> float:
    """ν, by which the sketched matrix is raised before it is decomposed."""
    n = A.shape[1]
    return 2.0**-11 * float(torch.linalg.matrix_norm(A @ probe_matrix(n, sketch_rank(n))))


def test_probes_are_the_same_everywhere() -> None:
    """Sketches of different machines add up, so that a change here is another protocol."""
    signs = (probe_matrix(40, 10)[:3, :8] * math.sqrt(40)).round().int()
    assert signs.tolist() == SIGNS
    assert [int((probe_matrix(n, sketch_rank(n)) > 0).sum()) for n in (5, 1025, 2049)] == POSITIVE
    omega = probe_matrix(1025, 256)
    assert torch.allclose(omega.abs(), torch.full_like(omega, 1 / math.sqrt(1025)), rtol=1e-15, atol=0)
    # Independent columns: of n entries two columns agree in about half, ± 6 of the √n/2 that chance gives.
    gram = (omega.T @ omega - torch.eye(256)).abs()
    assert float(gram.max()) < 6 / math.sqrt(1025)
    assert [sketch_rank(n) for n in (2, 5, 40, 1023, 1024, 100_000)] == [1, 1, 10, 255, 256, 256]


@pytest.mark.parametrize("rank", [1, 7, 12])
def test_a_factor_of_few_directions_is_kept(rank: int) -> None:
    """Exactly, but for the shift ν: ‖A + νI − Y(ΩᵀY)⁻¹Yᵀ‖ ≤ ν (1 + ‖Ω₂ Ω₁⁺‖²) where A has rank s ≤ r, with Ω₁ the
    probes along A's directions and Ω₂ those along all others (Halko et al. 2011, Theorem 9.1, with Σ₂ = √ν I).
    """
    n = 80
    values = torch.zeros(n, dtype=torch.float64)
    values[:rank] = torch.logspace(0, -2, rank, dtype=torch.float64)
    A = with_spectrum(values)
    own = eigen(Factor(sketch(A), SKETCH), ONE)
    assert own.partial
    Q, omega = orthogonal(n), probe_matrix(n, sketch_rank(n))
    along, beside = Q[:, :rank].T @ omega, Q[:, rank:].T @ omega
    bound = shift_of(A) * (1 + float(torch.linalg.matrix_norm(beside @ torch.linalg.pinv(along), 2)) ** 2)
    assert bound < 0.05
    # Beside the r directions ν is missing, and the mean of what the trace lacks is added.
    assert float(torch.linalg.matrix_norm(dense(own) - A, 2)) <= bound + shift_of(A) + float(own.values[0, -1])
    assert float(own.trace) == pytest.approx(float(values.sum()), rel=1e-12)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_error_of_a_decaying_spectrum(power: float) -> None:
    """E tr(M − M̂) ≤ (1 + k / (r − k − 1)) Σ_{i>k} λ_i(M) for every k < r − 1, of M = A + νI (Halko et al. 2011,
    Theorem 10.5, for Gaussian probes; M̂ ≤ M, so that the trace is the error's nuclear norm). What the mean of the
    rest adds has the same trace again. Over bases, as the probes are fixed.
    """
    n, errors, traces = 120, [], []
    r = sketch_rank(n)
    values = torch.arange(1, n + 1, dtype=torch.float64) ** -power
    for seed in range(8):
        Q = orthogonal(n, seed)
        A = (Q @ values.diag() @ Q.T).unsqueeze(0)
        own = eigen(Factor(sketch(A), SKETCH), ONE)
        errors.append(float(torch.linalg.matrix_norm(dense(own) - A, "nuc")))
        traces.append(float(own.trace))
        nu = shift_of(A)
        # Leading values are below those of A: an approximation from inside.
        assert bool((own.values[0, :r] <= values[:r] + 1e-12).all())
    tails = torch.tensor([float((values[k:] + nu).sum()) * (1 + k / (r - k - 1)) for k in range(r - 1)])
    assert sum(errors) / 8 <= 2 * float(tails.min()) + r * nu
    assert sum(errors) / 8 > 0.1 * float(tails.min())  # the bound says something
    assert traces == pytest.approx([float(values.sum())] * 8, rel=1e-12)


def test_sketches_of_two_sets_add_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    x = torch.randn(20, 40, dtype=torch.float64)
    Y = made_up(model, x)
    whole, one, two = (sums(model, x[rows], Y[rows], largest=8) for rows in (slice(0, 20), slice(0, 7), slice(7, 20)))
    total = one + two
    assert sum(name.endswith(SKETCH) for name in whole.arrays) == 3
    for name, array in whole.arrays.items():
        torch.testing.assert_close(total.arrays[name], array, rtol=1e-12, atol=1e-13)
    exact = {shaped.layer: shaped for shaped in sums(model, x, Y).layers()}
    for shaped in whole.layers():
        for part, full in ((shaped.inputs, exact[shaped.layer].inputs), (shaped.outputs, exact[shaped.layer].outputs)):
            assert part is not None
            assert full is not None
            if part.form:
                torch.testing.assert_close(part.values, sketch(full.square()), rtol=1e-10, atol=1e-12)


def partial(n: int, r: int, groups: int = 1) -> Eigen:
    vectors = torch.stack([orthogonal(n, seed)[:, :r] for seed in range(groups)])
    return Eigen(torch.rand(groups, r + 1, generator=torch.Generator().manual_seed(2)).double(), vectors)


def test_coordinates_keep_lengths_and_rows_are_their_inverse() -> None:
    rows = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = Eigen(torch.ones(2, 12).double(), torch.stack([orthogonal(12), orthogonal(12, 1)]))
    for own, k in ((partial(12, 4, 2), 16), (whole, 12), (Eigen(torch.ones(2, 12).double(), None), 12)):
        found = own.coordinates(rows)
        assert found.shape == (2, 6, k)
        assert own.spectrum.shape == (2, k)
        assert torch.allclose(found.norm(dim=2), rows.norm(dim=2), rtol=1e-12)
        assert torch.allclose(own.rows(found), rows, rtol=1e-12, atol=1e-13)
        # The matrix is the spectrum in these coordinates.
        assert torch.allclose(own.rows(found * own.spectrum.unsqueeze(1)), rows @ dense(own), atol=1e-12)
        assert torch.allclose(own.trace[:, 0], dense(own).diagonal(dim1=1, dim2=2).sum(1), rtol=1e-12)


NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Linear(24, 14), nn.Tanh(), nn.Linear(14, 3)),
    "shared": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 12)), nn.Conv1d(2, 12, 5, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(96, 3)
    ),
    "groups": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 6)), nn.Conv1d(4, 8, 4, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("time", [None, 5.0])
def test_the_flow_is_that_of_u_diag_u_and_the_mean_beside_it(kind: str, time: float | None) -> None:
    """Against dense algebra with A ⊗ G made of U diag(λ) Uᵀ + τ (I − U Uᵀ), of both factors of every layer."""
    torch.manual_seed(0)
    model, x = NETWORKS[kind]().double(), torch.randn(9, 24, dtype=torch.float64)
    found = sums(model, x, made_up(model, x), largest=4)
    assert any(name.endswith(SKETCH) for name in found.arrays)
    N, g = found.arrays["samples"], found.arrays["gradient"] / 9
    mu, delta, expected, met = 2.0, 0.05, torch.zeros_like(g), 0.0
    for shaped in found.layers():
        groups, n, _ = shaped.shape
        assert shaped.inputs is not None
        assert shaped.outputs is not None
        A, G = (dense(eigen(factor, N)) for factor in (shaped.inputs, shaped.outputs))
        if shaped.shared:
            G = G / G.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        columns = shaped.layer.matrices(torch.arange(len(g)), groups, n)
        for i in range(groups):
            own, C = columns[i].reshape(-1), torch.kron(G[i], A[i])
            values, vectors = torch.linalg.eigh(mu * C + delta * torch.eye(len(C)).to(C))
            phi = 1 / values if time is None else -torch.expm1(-time * values) / values
            expected[own] = -vectors @ (phi * (vectors.T @ g[own]))
            met += float(expected[own] @ C @ expected[own])
    change, curvature = Flow(found).change_and_curvature(time, mu, delta)
    assert torch.allclose(change, expected, rtol=1e-9, atol=1e-12)
    assert curvature == pytest.approx(met, rel=1e-9)
    assert float(Flow(found).step_lengths([g], time, mu, delta)) == pytest.approx(float(expected.norm()), rel=1e-9)


@pytest.mark.parametrize("n", [40, 1100])
def test_half_precision_on_the_wire_breaks_no_sketch(n: int) -> None:
    """Nyström divides by the smallest values of ΩᵀY, which rounding of 2⁻¹¹ could turn negative."""
    generator = torch.Generator().manual_seed(0)
    values = 10 ** (-6 * torch.arange(n, dtype=torch.float64) / n)
    low = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    for A in (with_spectrum(values) if n < 100 else (low @ low.T).unsqueeze(0), (1e-20 * low @ low.T).unsqueeze(0)):
        sent = Message.decode(Message("update", 1, {"a": sketch(A)}, halves=("a",)).encode())
        for like in (torch.zeros(0), torch.zeros(0).double()):
            read = eigen(Factor(sent.take("a", None, like), SKETCH), ONE.to(like))
            assert bool(read.values.isfinite().all())
            assert bool((read.values >= 0).all())
            error = float(torch.linalg.matrix_norm(dense(read).double() - A, 2))
            exact = float(torch.linalg.matrix_norm(dense(eigen(Factor(sketch(A), SKETCH), ONE)) - A, 2))
            assert error <= exact + 0.02 * float(torch.linalg.matrix_norm(A, 2))
            assert float(read.trace) == pytest.approx(float(A.diagonal(dim1=1, dim2=2).sum()), rel=2e-3)


def test_arrays_that_are_no_sketch_are_refused() -> None:
    for shape in ((1, 6), (1, 6, 1), (1, 6, 7), (1, 0, 2), (0, 6, 2)):
        assert Factor(torch.zeros(shape), SKETCH).size == -1
    assert Factor(torch.zeros(2, 6, 6), SKETCH).size == 6
    model = nn.Linear(30, 3).double()
    x = torch.randn(4, 30, dtype=torch.float64)
    found = curvature_sums(model, x, made_up(model, x), "ce", plan_jacobian(model, x), largest=20)
    assert [shaped.shape for shaped in Sums(found.arrays).layers()] == [(1, 3, 31)]
