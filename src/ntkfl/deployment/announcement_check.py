"""What a client answers: nothing that the contract it pins does not have, whoever signed the announcement."""

from __future__ import annotations

from ntkfl.deployment.contract import Federation
from ntkfl.errors import TrustError
from ntkfl.methods import Method
from ntkfl.services.announcement import EVALUATION, MOST_EXCHANGES, Announcement
from ntkfl.services.shuffler.batch import EVALUATORS, least_of


def check_contract(said: Announcement, federation: Federation, method: Method, role: str) -> None:
    """`TrustError` where an announcement asks for something else than the run's contract says."""
    terms, (round, exchange), batch = federation.terms, said.key, said.batch
    if not 1 <= round <= terms.most_rounds:
        raise TrustError(f"round {round} is none of the {terms.most_rounds} that the contract allows")
    if MOST_EXCHANGES <= exchange < EVALUATORS:
        raise TrustError(f"round {round} asks more often than a round needs to")
    if (said.kind == "evaluate") != (exchange in (EVALUATORS, EVALUATION)):
        raise TrustError(f"round {round} mixes up training and evaluation")
    apart = said.kind == "evaluate" and terms.sum_counts != (exchange == EVALUATORS)
    if apart and role == "evaluator":
        raise TrustError(f"round {round} asks for counts by themselves where the contract sums them, or the reverse")
    if batch is None:
        return
    if batch.min_clients < (least := least_of(said.key, federation.shuffler.min_clients)):
        raise TrustError(f"round {round} asks fewer than {least} clients")
    if batch.seconds is not None and batch.seconds < 1:
        raise TrustError(f"round {round} would be released before others could answer")
    if exchange == EVALUATORS:
        if not batch.numbers:
            raise TrustError(f"round {round} asks evaluators for counts without masks")
        return
    if len(batch.cohort) != terms.clients_per_round:
        raise TrustError(f"round {round} asks {len(batch.cohort)} clients, not {terms.clients_per_round}")
    if method.secure_sum and exchange not in (0, EVALUATION):
        raise TrustError(f"round {round} asks for a second sum over the same samples")
    if bool(batch.numbers) != summed(said, federation, method):
        raise TrustError(f"round {round} does not ask for a secure sum where the contract does, or the reverse")
    sampled = method.sampled or exchange == EVALUATION
    usual = terms.max_rows if sampled and not batch.numbers else 1
    # Replies to later questions may have one row per client: which do is known once there is one (`check_rows`).
    if batch.max_rows not in ((usual,) if exchange in (0, EVALUATION) else (usual, 1)):
        raise TrustError(f"round {round} asks for {batch.max_rows} rows, the contract for {usual}")


def check_rows(said: Announcement, count: int) -> None:
    """`TrustError` where every client is to send another number of rows than such a reply has by contract."""
    if said.batch is not None and said.batch.max_rows != count:
        raise TrustError(f"round {said.key.round} asks for {said.batch.max_rows} rows, the contract for {count}")


def summed(said: Announcement, federation: Federation, method: Method) -> bool:
    """Whether the answer is a part of a secure sum, by the contract."""
    return method.secure_sum or (said.kind == "evaluate" and federation.terms.sum_counts)
