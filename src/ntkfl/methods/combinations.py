"""Which settings of `[privacy]` and `[robust]` go with which method: the one place that refuses a combination.

What decides is the kind of reply that the method's clients send: rows, updates or sums.
"""

from __future__ import annotations

from typing import Literal

from ntkfl.errors import ConfigError
from ntkfl.methods.base import Method, adds_noise, kinds_of, privacy_of
from ntkfl.methods.robust import Robust
from ntkfl.methods.sums.noisy_sums import NoisySums
from ntkfl.privacy.settings import Privacy

_NOISE = ("epsilon", "delta", "budget_rounds", "noise_clients", "sampling_rate")
_OF_ROWS = ("sparsity", "values")
# Which kind of reply each bound is for, and whether it compares what single clients sent.
_BOUNDS = {
    "updates": ("update", True),
    "row_clip": ("rows", False),
    "trim_losses": ("rows", False),
}


def settle(
    method: Method, privacy: Privacy | None = None, robust: Robust | Literal["on"] | None = None
) -> tuple[Privacy, Robust]:
    """The settings of a run: those given over the method's own; `ConfigError` for a combination that is refused.

    `robust="on"` is every bound there is on what this method's clients send; None is no bound, as in the papers.
    """
    if not isinstance(privacy, Privacy | None):
        raise ConfigError(f"privacy must be ntkfl.methods.Privacy(…), not {privacy!r:.60}")
    if not isinstance(robust, Robust | None) and robust != "on":
        raise ConfigError(f'robust must be "on" or ntkfl.methods.Robust(…), not {robust!r:.60}')
    own = privacy_of(method, privacy)
    if robust == "on":
        single = not (own.secure_sum or adds_noise(method))  # what one client sent is seen, and may be compared
        kinds = kinds_of(method)
        robust = Robust.on([kind for kind in kinds if single or kind == "rows"])
    bounds = robust or Robust()
    _check_privacy(method, own)
    _check_bounds(method, own, bounds)
    return own, bounds


def _check_privacy(method: Method, privacy: Privacy) -> None:
    kinds = kinds_of(method)
    if privacy.secure_sum and not all(reply.additive for reply in method.replies.values()):
        raise ConfigError(f"{method.name} needs more of clients than the sum of their replies: leave secure_sum out")
    if "rows" not in kinds and (given := _changed(privacy, _OF_ROWS)):
        raise ConfigError(f"{given[0]} is for methods that send rows, and {method.name} sends {_words(kinds)}")
    if not adds_noise(method) and (given := _changed(privacy, _NOISE)):
        raise ConfigError(
            f"{given[0]} is for methods that add noise, and {method.name} adds none: take private-sums or private-ridge"
        )
    if isinstance(method, NoisySums):
        method.check_privacy(privacy)


def _check_bounds(method: Method, privacy: Privacy, robust: Robust) -> None:
    kinds = kinds_of(method)
    for name in _changed(robust, tuple(_BOUNDS)):
        kind, compares = _BOUNDS[name]
        if kind not in kinds:
            raise ConfigError(f"robust {name} bounds {_words({kind})}, and {method.name} sends {_words(kinds)}")
        if compares and privacy.secure_sum:
            raise ConfigError(f"robust {name} compares clients, of whom a secure sum shows none: leave one of them out")
        if compares and adds_noise(method):
            raise ConfigError(f"robust {name}: {method.name} clips every client's contribution already: leave it out")


def _changed(settings: Privacy | Robust, names: tuple[str, ...]) -> list[str]:
    """Those of the options that differ from their defaults."""
    fields = type(settings).model_fields
    return [name for name in names if getattr(settings, name) != fields[name].default]


def _words(kinds: set[str] | frozenset[str]) -> str:
    return " and ".join(sorted("updates" if kind == "update" else kind for kind in kinds))
