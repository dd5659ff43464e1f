"""One client, wherever it runs: it draws a round's samples, answers what the server asks, and keeps its memory.

Before `Client` stands what it is made of: seeds, features of a frozen backbone, and randomness.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ntkfl.errors import ConfigError
from ntkfl.methods import ClientRound, Method, State, Task
from ntkfl.methods.replies import Reply
from ntkfl.models.backbone import Adapted
from ntkfl.privacy.randomness import Randomness
from ntkfl.privacy.settings import Privacy
from ntkfl.privacy.subsample import subsample
from ntkfl.wire import Message

Batch = tuple[Tensor, Tensor]
Answer = Callable[[Method, Task, Message, ClientRound], Reply]
# What one client draws in a round: for all that it computes, and for the choice of samples, which nobody else may know.
Draws = Callable[[int], tuple[Randomness, random.Random]]
_BATCH = 64  # samples of one pass through a backbone


def derive(root: int, *labels: str | int) -> int:
    """A 63-bit seed bound to `root` and the labels: what one part of a run draws never shifts what another does."""
    text = "/".join(str(part) for part in (root, *labels))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded_torch(device: torch.device, root: int, *labels: str | int) -> Iterator[None]:
    """Within it torch's global generators, of CPU and device, draw from this seed; after it they are as before.

    For a user's own code in simulations: ours draws from generators of its own.
    """
    seed, cuda = derive(root, "torch", *labels), device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class FeatureCache:
    """x [N, …] → backbone(x) [N, …] on x's device, computed once for every content of x and kept in memory.

    The backbone is frozen, so the features of a client's samples are the same in all rounds. They are never sent.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone = backbone.eval()
        self._held: dict[bytes, Tensor] = {}

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Features of x [N, …]. The backbone sees `_BATCH` samples at once, so memory does not grow with N."""
        digest = hashlib.sha256(f"{x.dtype} {list(x.shape)};".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if (key := digest.digest()) not in self._held:
            self._held[key] = torch.cat([self.backbone(part) for part in torch.split(x, _BATCH)])
        return self._held[key]


def split_frozen(
    model: nn.Module, privacy: Privacy, device: torch.device | None = None
) -> tuple[nn.Module, FeatureCache | None]:
    """(what trains, the cache of what it takes): the head behind a frozen backbone; any other model whole, and None.

    The trained weights are the same numbers in the same order either way. Where inputs are projected, what the backbone
    gets changes with the run's secret: nothing is cached.
    """
    if not isinstance(model, Adapted) or not model.frozen or privacy.projected_dim is not None:
        return model, None
    front = model.backbone
    held = (*front.parameters(), *front.buffers())  # some backbones have buffers alone
    if device is not None and any(tensor.device != device for tensor in held):
        front = copy.deepcopy(front).to(device)
    return model.head, FeatureCache(front)


def seeded(seed: int, client: int) -> Draws:
    """From a root seed and the client's number: repeats, and is no secret. How simulations draw, so that a resumed run
    draws what the first one drew. The choice of samples has a generator of its own and shifts nothing else.
    """
    return lambda round: (
        Randomness.simulated(seed, "client", client, round),
        random.Random(derive(seed, "subsample", client, round)),
    )


def from_system(round: int) -> tuple[Randomness, random.Random]:
    """From the operating system: nobody else can know, or make, this client's choices. A round that is played again
    draws new noise, which the accountant has to count.
    """
    return Randomness.fresh(), random.SystemRandom()


def honest(method: Method, task: Task, question: Message, client: ClientRound) -> Reply:
    """The method's answer, if it is one that the method declares."""
    reply, kind = method.answer(task, question, client), method.replies.get(question.kind)
    if kind is None:
        raise ConfigError(f"{method.name}: `replies` must name a type for each question; {question.kind!r} has none")
    if not isinstance(reply, kind):
        raise ConfigError(f"{method.name}: `answer` must return {kind.__name__}.of(…), not {reply!r:.80}")
    for name, array in reply.arrays.items():
        if not isinstance(array, Tensor):
            raise ConfigError(f"{method.name}: {name!r} in a reply must be a tensor, not {array!r:.60}")
    return reply


class Client:
    """Client `number`. `data` gives its samples as the network gets them, already projected; with `rows`, no more than
    that many are used in a round. `memory` is what the method keeps between rounds, such as SCAFFOLD's control variate;
    answers change it. `respond` is the method's answer, or that of a client that cheats.
    """

    def __init__(
        self,
        number: int,
        task: Task,
        method: Method,
        data: Callable[[], Batch],
        draws: Draws,
        *,
        memory: State | None = None,
        rows: int | None = None,
        respond: Answer = honest,
    ) -> None:
        self.number, self.task, self.method, self.data = number, task, method, data
        self.draws, self.rows, self.respond = draws, rows, respond
        self.memory: State = {} if memory is None else memory
        self._now: tuple[int, ClientRound] | None = None  # a round, and the client as it is in it

    def at(self, round: int) -> ClientRound:
        """This client as it is in the round: x [n, …] and y [n] or [n, d2] of the samples drawn, memory, randomness.

        Samples are drawn once: all exchanges of a round are about the same ones.
        """
        if self._now is None or self._now[0] != round:
            x, y = self.data()
            drawn = self.drawn(round, len(y))
            if len(drawn) < len(y):
                x, y = x[drawn.to(x.device)], y[drawn.to(y.device)]
            self._now = round, ClientRound(self.number, x, y, self.draws(round)[0], self.memory)
        return self._now[1]

    def drawn(self, round: int, samples: int) -> Tensor:
        """Which of its samples it uses in the round, int64 [n]."""
        return subsample(samples, self.task.privacy.subsample_rate, self.draws(round)[1], self.rows)

    def answer(self, question: Message) -> Message:
        """The reply to a question of the server, by the method, on the round's samples."""
        return self.respond(self.method, self.task, question, self.at(question.round)).message(question.round)

    def rest(self) -> None:
        """Let go of the round's samples."""
        self._now = None
