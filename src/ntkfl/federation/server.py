"""Rounds one after another, each in the run's folder before the next begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.transport import Traffic, why_rejected
from ntkfl.methods import Outcome, State

OnRound = Callable[[Record, Record], None]


class Player(Protocol):
    """Who plays rounds, and what it needs to go on from a checkpoint."""

    def play(self, number: int) -> tuple[Record, Record]: ...

    def checkpoint(self) -> State: ...

    def restore(self, tensors: State) -> None: ...


def play_rounds(
    player: Player,
    folder: RunFolder | None,
    settings: Mapping[str, Any],
    *,
    resume: bool,
    on_round: OnRound | None = None,
) -> tuple[list[Record], list[Record]]:
    """Play `settings["rounds"]` rounds, or as far as `settings["stop_at"]` asks: (history, timings).

    The caller holds the folder's lock.
    """
    rounds, stop_at = int(settings["rounds"]), settings.get("stop_at")
    history, timings, tensors = folder.open(settings, resume) if folder else ([], [], {})
    if tensors:
        player.restore(tensors)
    for number in range(len(history) + 1, rounds + 1):
        if stop_at is not None and history and (history[-1]["test_accuracy"] or 0.0) >= stop_at:
            break
        record, timing = player.play(number)
        history.append(record)
        timings.append(timing)
        if folder:
            folder.append("history.jsonl", record)
            folder.append("timings.jsonl", timing)
            folder.save_checkpoint(number, player.checkpoint())
        if on_round:
            on_round(record, timing)
    return history, timings


def record_of(
    number: int,
    accuracy: float | None,
    loss: float | None,
    outcome: Outcome,
    traffic: Traffic,
    clients: Sequence[int] | Sequence[str],
) -> Record:
    """What every record says of its round; `failed` only where a client did, by name and with the reason, `rejected`
    only where rows or updates were, by why, and `repeated_rows` only where there were some.
    """
    rejected: Record = {"rejected": dict(traffic.rejected)} if traffic.rejected else {}
    if traffic.repeated:
        rejected["repeated_rows"] = traffic.repeated
    if traffic.rejected_clients:
        rejected["rejected_clients"] = traffic.rejected_clients
    return (
        {
            "round": number,
            "test_accuracy": accuracy,
            "test_loss": loss,
            "train_loss": outcome.train_loss,
            "steps": outcome.steps,
            "uplink_bytes": traffic.uplink.total(),
            "downlink_bytes": traffic.downlink.total(),
            "clients": list(clients),
            "uplink": dict(traffic.uplink),
            "downlink": dict(traffic.downlink),
        }
        | rejected
        | ({"failed": dict(traffic.failed)} if traffic.failed else {})
    )


def remarks(record: Record) -> list[str]:
    """What a round had to leave out, or to do otherwise than meant, as lines for a log."""
    said = []
    if record.get("rejected"):
        said.append(f"rejected: {why_rejected(record['rejected'])}")
    if record.get("solver_fallback"):
        said.append(f"solver: {record['solver_fallback']}")
    return said
