"""Layers one by one: geometry of convolutions, the cheaper form, ways of use that have no factors, and sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ntkfl
from ntkfl.tangent.blocks import FactoredBlock
from ntkfl.tangent.layers import ConvolutionBlock, EmbeddingBlock, LinearBlock, ScaleBlock
from tests.tangent.test_jacobian import autograd

EXACT = 1e-9


class Net(nn.Module):
    """Modules by name, and any function of them and x."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def check(model: nn.Module, x: Tensor, form: str = "auto") -> list[str]:
    """Every product against autograd; the kinds of block."""
    truth = autograd(model, x)
    J = ntkfl.jacobian(model, x, form=form)
    R, delta = torch.randn(J.shape[:2], dtype=torch.float64), torch.randn(2, J.shape[2], dtype=torch.float64)
    for ours, expected in [
        (J.dense(), truth),
        (J.kernel() * J.shape[1], torch.einsum("ajd,bjd->ab", truth, truth)),
        (J.vjp(R), torch.einsum("nj,njd->d", R, truth)),
        (J.jvp(delta), torch.einsum("njd,ad->anj", truth, delta)),
    ]:
        assert (ours - expected).abs().max() <= EXACT * max(1.0, float(expected.abs().max()))
    return [block.layout[0] for block in J.blocks]  # type: ignore[index]


class TestConvolution:
    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def test_any_geometry(self, data: st.DataObject) -> None:
        D = data.draw(st.integers(1, 2))
        groups = data.draw(st.integers(1, 2))
        kernel, stride, dilation, size = (
            tuple(data.draw(st.integers(low, high)) for _ in range(D)) for low, high in [(1, 3), (1, 3), (1, 2), (5, 6)]
        )
        padding = data.draw(st.one_of(st.tuples(*[st.integers(0, 4)] * D), st.sampled_from(["same", "valid"])))
        if padding == "same":
            stride = (1,) * D
        kind = (nn.Conv1d, nn.Conv2d)[D - 1]
        torch.manual_seed(0)
        conv = kind(2, 4, kernel, stride, padding, dilation, groups, bias=data.draw(st.booleans()))  # type: ignore[arg-type]

        def forward(m: nn.Module, x: Tensor) -> Tensor:
            out = m.conv(x).flatten(1)
            return torch.stack([torch.tanh(out).sum(1), out[:, 0]], 1)

        model = Net(forward, conv=conv)
        assert check(model, torch.randn(3, 2, *size, dtype=torch.float64), "factored") == ["convolution"]

    def test_the_smaller_form_is_kept_by_exact_count(self) -> None:
        """conv 5×5/2 16: 10·416 derivatives against 784 + 10·2,304; conv 3×3/2 32: 2,304 + 8,000 against 10·4,640."""
        model = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        x = torch.randn(3, 1, 28, 28)
        J = ntkfl.jacobian(model, x)
        assert [block.layout[0] for block in J.blocks] == ["convolution", "linear", "linear", "dense"]  # type: ignore[attr-defined]
        stored = {form: ntkfl.jacobian(model, x, form).nbytes / (4 * 3) for form in ("auto", "factored", "dense")}
        assert stored["auto"] == 4160 + (2304 + 8000) + (800 + 640) + (64 + 100)
        assert stored["factored"] == (784 + 23040) + (2304 + 8000) + (800 + 640) + (64 + 100)
        assert stored["dense"] == 10 * 56970


class TestGram:
    """Pairs of positions and dense rows are two ways to one matrix, each the cheaper somewhere, in any memory."""

    @pytest.mark.parametrize("few", [1, 40, 2**22])
    @pytest.mark.parametrize(("T", "n_in", "n_out"), [(1, 3, 4), (2, 60, 60), (9, 3, 4)])
    def test_of_a_linear_layer(self, T: int, n_in: int, n_out: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ntkfl.tangent.blocks.PAIRED", few)
        monkeypatch.setattr("ntkfl.tangent.blocks.DENSE_NUMBERS", few)
        columns = slice(0, n_in * n_out), slice(n_in * n_out, n_in * n_out + n_out)
        one, two = (
            LinearBlock(torch.randn(N, T, n_in).double(), torch.randn(N, 2, T * n_out).double(), *columns)
            for N in (5, 4)
        )
        for other in (one, two):
            expected = one.densify().values.flatten(1) @ other.densify().values.flatten(1).T
            assert (one.gram(other) - expected).abs().max() < EXACT

    @pytest.mark.parametrize("few", [1, 2, 4, 100])
    def test_of_a_convolution_with_few_positions_and_many_weights(
        self, few: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ntkfl.tangent.blocks.PAIRED", few)
        a, g = torch.randn(3, 9, 2, 2).double(), torch.randn(3, 4, 20 * 2).double()
        block = ConvolutionBlock(a, g, slice(0, 20 * 9 * 2), slice(360, 380), (1, 2, 1, 1, 0, 0, 1, 1, 1))
        expected = block.densify().values.flatten(1) @ block.densify().values.flatten(1).T
        assert (block.gram(block) - expected).abs().max() < EXACT


class TestEmbedding:
    def model(self, **options: object) -> nn.Module:
        words, out = nn.Embedding(50, 4, **options), nn.Linear(4, 3)  # type: ignore[arg-type]
        return Net(lambda m, x: m.out(torch.tanh(m.words(x).cumsum(1)).sum(1)), words=words, out=out)

    @pytest.mark.parametrize("options", [{}, {"padding_idx": 7}, {"padding_idx": -1}, {"sparse": True}])
    def test_tokens(self, options: dict[str, object]) -> None:
        x = torch.randint(0, 50, (5, 6))
        x[:, 2], x[1, 3:], x[2, :4] = 7, 7, 49  # tokens that samples share, and that a sample repeats
        if "sparse" in options:
            J = ntkfl.jacobian(self.model(**options), x)
            assert isinstance(J.blocks[0], EmbeddingBlock)  # type: ignore[attr-defined]
        else:
            assert check(self.model(**options), x, "factored") == ["embedding", "linear"]

    def test_gradients_that_depend_on_the_batch_are_left_to_autograd(self) -> None:
        kinds = check(self.model(max_norm=1e6), torch.randint(0, 50, (5, 6)))
        assert kinds == ["linear", "dense"]


class TestNorms:
    def test_a_layer_norm_of_vectors_keeps_its_factors(self) -> None:
        a, norm, out = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        model = Net(lambda m, x: m.out(torch.tanh(m.norm(m.a(x)))), a=a, norm=norm, out=out)
        x = torch.randn(5, 4, dtype=torch.float64)
        assert check(model, x) == ["linear", "scale", "linear"]
        block = ntkfl.jacobian(model, x).blocks[1]  # type: ignore[attr-defined]
        assert isinstance(block, ScaleBlock)
        assert block.a.shape == (5, 1, 6)

    @pytest.mark.parametrize(
        "norm",
        [
            nn.LayerNorm((2, 3)),
            nn.LayerNorm(3, bias=False),
            nn.LayerNorm(3, elementwise_affine=False),
            nn.RMSNorm(3),
            nn.GroupNorm(2, 4),
            nn.GroupNorm(2, 4, affine=False),
            nn.BatchNorm2d(4),
        ],
        ids=str,
    )
    def test_over_positions(self, norm: nn.Module) -> None:
        for p in norm.parameters():
            nn.init.normal_(p)
        conv, out = nn.Conv2d(4, 4, 1), nn.Linear(24, 3)
        model = Net(lambda m, x: m.out(torch.tanh(m.norm(m.conv(x))).flatten(1)), conv=conv, norm=norm, out=out)
        x = torch.randn(5, 4, 2, 3, dtype=torch.float64)
        assert check(model, x)[-1] == "dense"
        check(model, x, "factored")

    def test_batch_statistics_are_refused(self) -> None:
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
        with pytest.raises(ntkfl.errors.ModelError, match="depends on the other samples"):
            ntkfl.jacobian(model, torch.randn(6, 4))


class TestRecurrent:
    @pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
    @pytest.mark.parametrize(("layers", "both"), list(itertools.product([1, 2], [False, True])))
    def test_states_in_and_out(self, kind: type[nn.RNNBase], layers: int, both: bool) -> None:
        """An initial state that depends on the input and on weights, and both final states in the output."""
        cell = kind(2, 3, num_layers=layers, bidirectional=both, batch_first=True)
        count = layers * (1 + both)

        def forward(m: nn.Module, x: Tensor) -> Tensor:
            h = m.start(x[:, 0]).view(len(x), count, 3).transpose(0, 1).contiguous()
            out, last = m.cell(x, (h, h.sin()) if kind is nn.LSTM else h)
            states = torch.cat([s.transpose(0, 1).flatten(1) for s in (last if kind is nn.LSTM else (last,))], 1)
            return m.out(torch.cat([states, out.flatten(1)], 1))

        width = (2 if kind is nn.LSTM else 1) * 3 * count + 4 * 3 * (1 + both)
        model = Net(forward, start=nn.Linear(2, 3 * count), cell=cell, out=nn.Linear(width, 2))
        check(model, torch.randn(3, 4, 2, dtype=torch.float64), "factored")

    def test_a_learned_initial_state_needs_no_pass_per_sample(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is dense is differentiated through the unrolled layer too, which batches; the fused one does not."""
        monkeypatch.setattr("ntkfl.tangent.passes._gradients", None)
        model = Net(
            lambda m, x: m.out(m.cell(x, m.start.weight.unsqueeze(1).expand(1, len(x), 3).contiguous())[0][:, -1]),
            start=nn.Embedding(1, 3), cell=nn.GRU(2, 3, batch_first=True), out=nn.Linear(3, 2),
        )  # fmt: skip
        assert check(model, torch.randn(3, 4, 2, dtype=torch.float64))[-1] == "dense"

    def test_packed_sequences_are_left_to_autograd(self) -> None:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), 3)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return m.out(m.cell(packed)[1][0])

        model = Net(forward, cell=nn.GRU(2, 3, batch_first=True), out=nn.Linear(3, 2))
        assert check(model, torch.randn(3, 4, 2, dtype=torch.float64)) == ["linear", "dense"]


class TestAttention:
    @pytest.mark.parametrize("mask", ["none", "causal", "bool", "per head", "padding", "float padding"])
    @pytest.mark.parametrize("first", [True, False])
    def test_masks(self, mask: str, first: bool) -> None:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            L, N = x.shape[1], len(x)
            causal = torch.ones(L, L, dtype=torch.bool).triu(1)
            both = torch.stack([causal, torch.zeros_like(causal)])  # one head looks back, the other everywhere
            padding = torch.zeros(N, L, dtype=torch.bool)
            padding[:, -1] = True
            options: dict[str, dict[str, object]] = {
                "none": {},
                "causal": {"attn_mask": causal.double() * -2.0},
                "bool": {"attn_mask": causal},
                "per head": {"attn_mask": both.repeat(N, 1, 1), "average_attn_weights": False},
                "padding": {"key_padding_mask": padding},
                "float padding": {"key_padding_mask": padding.double() * -3.0},
            }
            h = x if first else x.transpose(0, 1)
            out, weights = m.attention(h, h, h, **options[mask])
            out = out if first else out.transpose(0, 1)
            return m.out(out.flatten(1)) + weights.reshape(N, -1)[:, :2]

        attention, out = nn.MultiheadAttention(4, 2, batch_first=first), nn.Linear(12, 2)
        model = Net(forward, attention=attention, out=out)
        check(model, torch.randn(3, 3, 4, dtype=torch.float64), "factored")

    def test_used_on_itself_and_across(self) -> None:
        """The same weights whole and in parts: no factors in common, so one dense block."""

        def forward(m: nn.Module, x: Tensor) -> Tensor:
            h = m.attention(x, x, x)[0]
            return m.attention(h, x, x)[0].flatten(1)[:, :2]

        model = Net(forward, attention=nn.MultiheadAttention(4, 2, batch_first=True))
        x = torch.randn(3, 3, 4, dtype=torch.float64)
        check(model, x)
        with pytest.raises(ntkfl.errors.ModelError, match=r"attention\.in_proj_weight"):
            ntkfl.jacobian(model, x, form="factored")


class TestWaysOfUse:
    def test_rows_of_sequences_of_several_lengths(self) -> None:
        """Joined, they have no factors in common where positions count, and keep those of the layer behind the mean."""
        model = Net(lambda m, x: m.out(torch.tanh(m.a(x)).mean(1)), a=nn.Linear(3, 5), out=nn.Linear(5, 2))
        xs = [torch.randn(4, T, 3, dtype=torch.float64) for T in (1, 2)]
        J = ntkfl.concatenate([ntkfl.jacobian(model, x, "factored") for x in xs])
        assert [block.layout[0] for block in J.blocks] == ["dense", "linear"]
        truth = torch.cat([autograd(model, x) for x in xs])
        assert (J.dense() - truth).abs().max() < EXACT
        assert (2 * J.kernel() - torch.einsum("ajd,bjd->ab", truth, truth)).abs().max() < EXACT

    def test_a_layer_that_sees_no_sample(self) -> None:
        """A linear layer over a learned constant: the same for all samples, and no row of its own for any."""
        a, out = nn.Linear(4, 4), nn.Linear(4, 3)
        model = Net(lambda m, x: m.out(torch.tanh(x * m.a(torch.ones(2, 4).double()).sum(0))), a=a, out=out)
        assert check(model, torch.randn(5, 4, dtype=torch.float64)) == ["linear", "dense"]

    def test_one_tensor_as_weight_and_bias(self) -> None:
        norm, out = nn.LayerNorm(4), nn.Linear(4, 3)
        norm.bias = norm.weight
        model = Net(lambda m, x: m.out(torch.tanh(m.norm(x))), norm=norm, out=out)
        assert check(model, torch.randn(5, 4, dtype=torch.float64)) == ["linear", "dense"]

    def test_a_layer_with_a_hook_or_a_forward_of_its_own_is_not_replaced(self) -> None:
        for change in ("hook", "forward"):
            a, out = nn.Linear(4, 4), nn.Linear(4, 3)
            model = Net(lambda m, x: m.out(torch.tanh(m.a(x))), a=a, out=out)
            if change == "hook":
                a.register_forward_hook(lambda module, args, result: result * 2)
            else:
                a.forward = lambda x, own=a.forward: own(x) ** 2  # type: ignore[method-assign, misc]
            assert check(model, torch.randn(5, 4, dtype=torch.float64)) == ["linear", "dense"]

    def test_layers_have_their_own_forward_back_even_after_an_error(self) -> None:
        calls = []

        def forward(m: nn.Module, x: Tensor) -> Tensor:
            calls.append(len(x))
            if torch.is_grad_enabled():
                raise ValueError("not today")
            return m.a(x)

        model = Net(forward, a=nn.Linear(4, 4))
        with pytest.raises(ValueError, match="not today"):
            ntkfl.jacobian(model, torch.randn(5, 4, dtype=torch.float64))
        assert "forward" not in model.a.__dict__  # type: ignore[operator]
        assert not model.a._forward_hooks  # type: ignore[union-attr]

    def test_a_backward_pass_that_does_not_batch(self) -> None:
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)  # type: ignore[attr-defined]
                return x**2

            @staticmethod
            def backward(ctx: object, g: Tensor) -> Tensor:  # type: ignore[override]
                float(g.sum())  # what no batching rule survives
                return 2 * g * ctx.saved_tensors[0]  # type: ignore[attr-defined, no-any-return]

        model = Net(lambda m, x: m.out(Square.apply(m.a(x))), a=nn.Linear(4, 5), out=nn.Linear(5, 3))
        assert check(model, torch.randn(5, 4, dtype=torch.float64), "factored") == ["linear", "linear"]


def test_chunks_never_hold_a_million_weights_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of 1.3 million weights: no tensor that the Jacobian holds comes near d2·d numbers a row."""
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1200), nn.Tanh(), nn.Linear(1200, 10))
    monkeypatch.setattr(FactoredBlock, "densify", None)
    J = ntkfl.jacobian(model, torch.randn(300, 64))
    assert J.shape[2] > 1_300_000
    assert J.nbytes < 300 * 4 * 30_000
    R = torch.randn(300, 10)
    assert J.jvp(J.vjp(R)).shape == (300, 10)
    assert J.kernel().shape == (300, 300)
