"""Where a partly frozen backbone can be cut: before its first layer that trains, nothing changes between rounds.

A network is any code, so what comes behind the cut is guessed (its submodules one after another, as they were
registered) and then tried: on random inputs, with other weights in what trains, both ways must agree.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ntkfl.models.backbone import Adapted, Backbone

FIRST = "its first layer trains"  # nothing is lost: there is nothing to compute once
_AGREE = 1e-5  # relative: sums in another order


class _Reached(Exception):
    """Carries what the first submodule behind the cut was given."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given


class FrozenFront(nn.Module):
    """x → what the submodule `name` of `network` is given, [N, …]; what lies behind it does not run."""

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network, self.name = network, name

    def forward(self, x: Tensor) -> Tensor:
        def stop(_: nn.Module, given: tuple[object, ...]) -> None:
            if len(given) != 1 or not isinstance(given[0], Tensor):
                raise ValueError("more than one tensor crosses the cut")
            raise _Reached(given[0])

        hook = self.network.get_submodule(self.name).register_forward_pre_hook(stop)
        try:
            self.network(x)
        except _Reached as reached:
            return reached.given
        finally:
            hook.remove()
        raise ValueError("the submodule is not used")

    def extra_repr(self) -> str:
        return f"before {self.name}"


class Cut(NamedTuple):
    """The front, which never changes, and the rest of the model, which shares its weights with the whole."""

    front: FrozenFront
    rest: Adapted


def cut_frozen(model: Adapted) -> Cut | str:
    """The model cut before the first part of its backbone that trains; or why it cannot be, in a few words."""
    backbone = model.backbone
    if backbone.also:
        return "inputs of its submodules are features too (also)"
    if model.inputs is None:
        return "the shape of an input is not known: give head(…, inputs=…)"
    found = _chain(backbone.network)
    if isinstance(found, str):
        return found
    name, rest = found
    trained = {id(p) for p in backbone.parameters() if p.requires_grad}
    if trained - {id(p) for part in rest.values() for p in part.parameters()}:
        return "weights that train are not part of its layers in a row"
    why = _differs(backbone, name, rest, model.inputs)
    if why is not None:
        return why
    tail = Backbone(nn.Sequential(rest), backbone.pool).eval()
    return Cut(FrozenFront(_without(backbone.network, rest), name), Adapted(tail, model.head))


def _without(network: nn.Module, rest: OrderedDict[str, nn.Module]) -> nn.Module:
    """The network with the identity in place of what lies behind the cut, and weights that are not copied."""
    known = [*network.parameters(), *network.buffers()]
    gone = {id(module) for module in rest.values()}
    names = [name for name, module in network.named_modules() if id(module) in gone]
    left = copy.deepcopy(network, {id(tensor): tensor for tensor in known})
    for name in names:
        parent, _, own = name.rpartition(".")
        setattr(left.get_submodule(parent), own, nn.Identity())
    return left


def _chain(network: nn.Module) -> tuple[str, OrderedDict[str, nn.Module]] | str:
    """(the first submodule that trains, it and all that are registered behind it), inside nested `nn.Sequential`s."""
    path, first, behind = "", network, list[tuple[str, nn.Module]]()
    while True:
        children = list(first.named_children())
        at = next((i for i, (_, part) in enumerate(children) if any(p.requires_grad for p in part.parameters())), None)
        if at is None:
            return "what trains belongs to no submodule"
        name, part = children[at]
        behind = [(_dotless(path, own), module) for own, module in children[at + 1 :]] + behind
        path = f"{path}.{name}" if path else name
        if not (isinstance(part, nn.Sequential) and len(part) > 1):
            break
        first = part
    return path, OrderedDict([(path.replace(".", "_"), part), *behind])


def _dotless(path: str, name: str) -> str:
    return f"{path}.{name}".replace(".", "_") if path else name


def _differs(backbone: Backbone, name: str, rest: OrderedDict[str, nn.Module], inputs: tuple[int, ...]) -> str | None:
    """Why front and rest are not the whole; None where they are. What trains is changed first, so that weights that
    happen to be zero hide nothing.
    """
    parts = nn.ModuleList([backbone, nn.Sequential(rest)])
    whole, tail = copy.deepcopy(parts)
    assert isinstance(whole, Backbone)
    like = next(iter(whole.parameters()))
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in whole.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
            x = torch.randn(2, *inputs, generator=generator).to(like)
            expected, front = whole(x), FrozenFront(whole.network, name)(x)
            if torch.equal(front, x):
                return FIRST
            found = Backbone(tail, backbone.pool)(front)
    except Exception as error:  # whatever a user's network raises
        return (str(error).splitlines() or [type(error).__name__])[0]
    same = found.shape == expected.shape and bool((found - expected).norm() <= _AGREE * expected.norm())
    return None if same else "its layers do more than follow one another"
