"""Uploads and the preset that projects, sparsifies and shuffles them: stages, bytes, and what a server refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ntkfl
from ntkfl.errors import ConfigError
from ntkfl.methods import CPNTKFL, NTKFL
from ntkfl.methods.base import privacy_of
from ntkfl.methods.ntk_fl import TangentRows
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.sparsify import kept
from ntkfl.wire.topk import topk_form
from tests.methods.rounds import ask, small_clients, small_task


def train(fed: ntkfl.data.Federated, method: NTKFL, rounds: int = 4, **privacy: Any) -> ntkfl.Run:
    torch.manual_seed(0)
    given = Privacy(**privacy)
    model = ntkfl.models.mlp(privacy_of(method, given).projected_dim or 64, 24, 10)
    return ntkfl.train(model, fed, method, rounds=rounds, clients_per_round=5, privacy=given, callbacks=[])


def test_the_preset_is_the_papers_table_1() -> None:
    stages = privacy_of(CPNTKFL())
    assert (stages.projected_dim, stages.subsample_rate) == (200, 0.3)
    assert stages.sparsity >= 0.97
    assert stages.shuffle
    assert stages.values == "8bit"
    with pytest.raises(ConfigError, match="projected_dim must be below the 64"):
        stages.model_input_shape((1, 8, 8))


def test_every_stage_can_be_switched_off_and_what_is_left_is_ntk_fl(
    digits: ntkfl.data.Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = Privacy().model_dump(include={"subsample_rate", "projected_dim", "sparsity", "shuffle"})
    monkeypatch.setattr(CPNTKFL, "prior", 0.0)
    smoothing = NTKFL.model_fields["label_smoothing"].default
    assert train(digits, CPNTKFL(label_smoothing=smoothing), 2, **off).history == train(digits, NTKFL(), 2).history


@pytest.mark.parametrize("codec", ["topk", "factored", "dense"])
def test_uplink_bytes_are_those_of_the_codec(codec: str, digits: ntkfl.data.Federated) -> None:
    """Rows of a round have one size, which the codec's own arithmetic gives."""
    method = CPNTKFL(form="dense" if codec == "dense" else "auto", choose="validation")  # so that rows are all there is
    privacy = Privacy(projected_dim=20, sparsity=0.97 if codec == "topk" else 0.0)
    how: dict[str, Any] = {"rounds": 1, "clients_per_round": 5, "hold_out": 2, "callbacks": []}
    record = ntkfl.train(ntkfl.models.mlp(20, 24, 10), digits, method, privacy=privacy, **how).history[0]
    d = 20 * 24 + 24 + 24 * 10 + 10
    n = 10 * d
    payload = {
        "topk": sum(width * dtype.itemsize for dtype, width in topk_form(n, kept(0.97, n)).values()),
        "factored": 4 * (20 + 10 * 24 + 24 + 10 * 10),
        "dense": 4 * n,
    }[codec]
    row = record["uplink"]["rows"] / record["samples"]
    assert payload + 4 * 10 + 1 < row < payload + 4 * 10 + 1 + 360  # outputs, label, and headers, seal and frame


# Uploads.


@pytest.mark.parametrize("privacy", [Privacy(), Privacy(sparsity=0.5), Privacy(sparsity=0.5, values="8bit")])
@pytest.mark.parametrize("form", ["auto", "dense"])
def test_an_upload_is_what_the_network_gives_there_and_back_in_rows(privacy: Privacy, form: str) -> None:
    """Decoded as it is checked, and as rows of a shuffler joined in another order."""
    task, (client,) = small_task(dtype=torch.float32, privacy=privacy), small_clients(6, dtype=torch.float32)
    reply = ask(NTKFL(form=form), task, client)
    assert isinstance(reply, TangentRows)
    J = task.jacobian(task.like, client.x).dense()
    near = 0.05 if privacy.values == "8bit" else 1e-6
    sent = reply.J.dense()
    torch.testing.assert_close(sent, torch.where(sent == 0, 0, J), rtol=near, atol=1e-7)
    assert int((sent == 0).sum()) >= (J.numel() // 2 if privacy.sparsity else 0)
    torch.testing.assert_close(reply.outputs, task.predict(task.like, client.x))
    assert torch.equal(reply.labels, client.y)
    rows = reply.split()
    assert len(rows) == len(reply) == 6
    (whole,) = TangentRows.join(rows[::-1])
    whole.check(task)
    assert torch.equal(whole.J.dense(), sent.flip(0))
    assert len(TangentRows.blank(NTKFL(form=form), task, None).message(1).encode()) == len(rows[0].message(1).encode())
