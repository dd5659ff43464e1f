"""Small float64 networks of the kinds people bring, each with five inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual network in small: stem, two blocks (the second strided, with a 1×1 shortcut), mean, linear."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), norm(4)
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), norm(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), norm(6)
        self.short, self.out = nn.Conv2d(4, 6, 1, stride=2), nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm(self.stem(x)))
        h = self.relu(h + self.norm1(self.conv1(h)))
        h = self.relu(self.short(h) + self.norm2(self.conv2(h)))
        return self.out(h.mean(dim=(2, 3)))


def with_statistics(model: nn.Module) -> nn.Module:
    """Running statistics and affine parameters that are not the ones a layer is born with."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            m.running_mean.normal_()  # type: ignore[union-attr]
            m.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            nn.init.normal_(m.weight, 1, 0.3)
            nn.init.normal_(m.bias)
    return model


class Recurrent(nn.Module):
    """A recurrent layer over [N, 6, 3], its last output (and state) to a linear layer."""

    def __init__(self, kind: type[nn.RNNBase], state: bool = False, **options: object) -> None:
        super().__init__()
        self.cell = kind(3, 4, **options)  # type: ignore[arg-type]
        self.state = state
        width = (self.cell.proj_size or 4) * (1 + self.cell.bidirectional) + 4 * state
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, last = self.cell(x if self.cell.batch_first else x.transpose(0, 1))
        h = h if self.cell.batch_first else h.transpose(0, 1)
        if self.state:
            last = last[1] if isinstance(last, tuple) else last
            return self.out(torch.cat([h.mean(1), last[-1]], dim=1))
        return self.out(h[:, 2] + h[:, -1])


class ByHand(nn.Module):
    """A recurrence over cells, written as a loop, with a learned initial state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.rnn = nn.GRUCell(3, 4), nn.LSTMCell(4, 5), nn.RNNCell(5, 4, nonlinearity="relu")
        self.start, self.out = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, state, last = self.start.expand(len(x), -1), None, None
        for t in range(x.shape[1]):
            h = self.gru(x[:, t], h)
            state = self.lstm(h, state)
            last = self.rnn(state[0], last)
        return self.out(last)


class Transformer(nn.Module):
    """Embedding, positions, one pre-norm block of attention and perceptron, mean, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8, padding_idx=0), nn.Parameter(torch.randn(6, 8))
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions
        n = self.norm1(h)
        h = h + self.attention(n, n, n, key_padding_mask=x == 0, need_weights=False)[0]
        h = h + self.mlp(self.norm2(h))
        return self.out(h.mean(1))


class TimeMajor(nn.Module):
    """PyTorch's own encoder layer, with time before samples throughout and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x.transpose(0, 1))
        causal = nn.Transformer.generate_square_subsequent_mask(len(h), device=h.device, dtype=h.dtype)
        return self.out(self.layer(h, src_mask=causal, is_causal=True)[-1])


class Cross(nn.Module):
    """Attention of a few learned queries over a sequence, with keys and values of their own widths or not."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 8)
        self.queries = nn.Parameter(torch.randn(2, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)  # type: ignore[arg-type]
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inside(x))
        keys = x if self.attention.kdim == 3 else h
        mixed, weights = self.attention(self.queries.expand(len(x), -1, -1), keys, h)
        return self.out(mixed.flatten(1)) + weights.sum(dim=(1, 2), keepdim=True)[:, 0] * h[:, 0, :3]


class TiedEmbedding(nn.Module):
    """One matrix embeds the tokens and scores them: eleven outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.score = nn.Embedding(11, 5), nn.Linear(5, 5), nn.Linear(5, 11)
        self.score.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.score(torch.tanh(self.mix(self.tokens(x).sum(1))))


class FunctionalConvolution(nn.Module):
    """A filter used through its module and, transposed, without it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(2, 3, 2), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x.view(-1, 2, 6)))
        return self.out(F.conv_transpose1d(h, self.conv.weight).flatten(1))


class TwoSizes(nn.Module):
    """One convolution used on images of two sizes, and at one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(torch.tanh(self.conv(x.expand(-1, 2, -1, -1)))))
        return self.out(torch.tanh(self.conv(F.avg_pool2d(h, 2))).mean(dim=(2, 3)))


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(names))
    return model


def images(channels: int = 1, size: int = 8) -> Tensor:
    return torch.randn(5, channels, size, size, dtype=torch.float64)


def sequences() -> Tensor:
    return torch.randn(5, 6, 3, dtype=torch.float64)


def tokens() -> Tensor:
    x = torch.randint(1, 11, (5, 6))
    x[0, 4:], x[3, 2:] = 0, 0  # padding
    return x


def strided() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh(),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def separable() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.Conv2d(4, 8, 3, groups=4, padding=1), nn.Conv2d(8, 6, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def dilated() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(6, 4, 2, dilation=2, padding="same"), nn.Tanh(), nn.Conv1d(4, 6, 2, stride=2, padding=3, groups=2),
        nn.Tanh(), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def in_place() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ELU(inplace=True), nn.GroupNorm(3, 3), nn.ELU(inplace=True), nn.Flatten(),
        nn.Linear(108, 6), nn.LayerNorm(6), nn.ELU(inplace=True), nn.Linear(6, 3),
    )  # fmt: skip


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "strided convolutions with pooling": (strided, images),
    "depthwise-separable convolutions": (separable, images),
    "dilated convolutions in one dimension": (lambda: with_statistics(dilated()), sequences),
    "circular convolution": (
        lambda: nn.Sequential(
            nn.Conv1d(6, 4, 2, padding=1, padding_mode="circular"), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
        ),
        sequences,
    ),
    "residual, group norm": (lambda: with_statistics(Residual(lambda c: nn.GroupNorm(2, c))), images),
    "residual, batch norm": (lambda: with_statistics(Residual(nn.BatchNorm2d)), images),
    "GRU": (lambda: Recurrent(nn.GRU, state=True, batch_first=True), sequences),
    "GRU, time first, no bias": (lambda: Recurrent(nn.GRU, bias=False), sequences),
    "LSTM of two layers": (
        lambda: Recurrent(nn.LSTM, state=True, num_layers=2, dropout=0.5, batch_first=True),
        sequences,
    ),
    "LSTM with projection": (lambda: Recurrent(nn.LSTM, proj_size=2), sequences),
    "bidirectional RNN": (lambda: Recurrent(nn.RNN, bidirectional=True, num_layers=2), sequences),
    "relu RNN, no bias": (lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False, batch_first=True), sequences),
    "cells by hand": (ByHand, sequences),
    "tied embedding": (TiedEmbedding, tokens),
    "transformer block": (lambda: with_statistics(Transformer()), tokens),
    "encoder layer, time first": (lambda: with_statistics(TimeMajor()), sequences),
    "cross-attention": (Cross, sequences),
    "cross-attention of other widths": (lambda: Cross(kdim=3, vdim=8), sequences),
    "cross-attention with extra keys": (lambda: Cross(add_bias_kv=True, add_zero_attn=True), sequences),
    "frozen stem": (lambda: frozen(Residual(lambda c: nn.GroupNorm(2, c)), "stem", "conv1", "norm1.bias"), images),
    "frozen weights, biases train": (
        lambda: frozen(strided(), "0.weight", "3.weight", "6.weight"),
        images,
    ),
    "frozen recurrent layer behind a trained one": (
        lambda: frozen(nn.Sequential(nn.Linear(3, 3), Recurrent(nn.GRU, batch_first=True)), "1.cell"),
        sequences,
    ),
    "a hundred outputs": (lambda: nn.Sequential(strided(), nn.Tanh(), nn.Linear(3, 100)), images),
    "in-place activations": (in_place, images),
    "functional use of a filter": (FunctionalConvolution, lambda: torch.randn(5, 12, dtype=torch.float64)),
    "one filter, two sizes": (TwoSizes, images),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(2)
    model, inputs = ARCHITECTURES[name]
    return model().double(), inputs()
