"""What a comparison is of, and the settings of its methods, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ntkfl.compare.spec import Comparison, Entry
from ntkfl.federation.config import build_method
from ntkfl.methods import Method
from ntkfl.user_code import is_code


def title(comparison: Comparison) -> str:
    """Data, clients and seeds of all runs, in a line."""
    data = comparison.data
    seeds = f"{len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else f"seed {comparison.seeds[0]}"
    most = "" if "clients_per_round" in comparison.model_fields_set else "up to "
    cohort = f"{most}{comparison.clients_per_round}"
    each = " clients" if data.own or data.partition == "client" else ""
    return f"{data.text}, {cohort}{each} per round, {seeds}"


def described(comparison: Comparison) -> str:
    """The title with the network, which seeds they were, and what ± stands for."""
    text = f"{title(comparison)}, model {comparison.model.text}"
    if len(comparison.seeds) == 1:
        return f"{text}."
    seeds = ", ".join(map(str, comparison.seeds))
    return f"{text}. ± is the sample standard deviation over seeds {seeds}."


def setting_texts(comparison: Comparison, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The settings of each entry's runs, by label: what was given or chosen, options that its user's own class brings,
    and, given or not, options in which methods that have them differ.
    """
    methods = {label: build_method(dict(setting)) for label, setting in settings.items()}
    entries = {entry.label: entry for entry in comparison.methods}
    texts = {}
    for label, method in methods.items():
        given = {name: value for name, value in settings[label].items() if name != "name"}
        told = [name for name in type(method).model_fields if _is_own(method, name) or _differs(method, name, methods)]
        shown = given | {name: getattr(method, name) for name in told}
        words = [f"{name} {_short(value)}" for name, value in shown.items()]
        texts[label] = ", ".join([*words, *_aside(entries[label])]) or "defaults"
    return texts


def _aside(entry: Entry) -> list[str]:
    """What an entry has otherwise than the comparison, beside the options of its method."""
    words = [f"{name} {_short(getattr(entry.privacy, name))}" for name in sorted(entry.privacy.model_fields_set)]
    if entry.robust == "on":
        words.append("robust")
    else:
        words += [
            f"robust {name} {_short(getattr(entry.robust, name))}" for name in sorted(entry.robust.model_fields_set)
        ]
    if entry.clients_per_round is not None:
        words.append(f"{entry.clients_per_round} clients per round")
    if entry.model is not None:
        words.append(f"network {entry.model.name}")
    if entry.byzantine is not None:
        words.append(f"{entry.byzantine.fraction:.0%} of clients Byzantine: {entry.byzantine.kind}")
    return words


def _is_own(method: Method, name: str) -> bool:
    """Whether a class of the user's own declares the option: no page of ours has its default."""
    return is_code(method.name) and not _declaring(type(method), name).__module__.startswith("ntkfl.")


def _differs(method: Method, name: str, methods: Mapping[str, Method]) -> bool:
    """Whether another method has the option, and another value. Where classes declare it apart, it is another option
    of that name.
    """
    declared = _declaring(type(method), name)
    return any(
        getattr(other, name) != getattr(method, name)
        for other in methods.values()
        if name in type(other).model_fields and _declaring(type(other), name) is declared
    )


def _declaring(method: type[Method], name: str) -> type:
    """The class that brought an option in, whatever default its children gave it."""
    return next(base for base in reversed(method.__mro__) if name in getattr(base, "model_fields", {}))


def _short(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 3:
        return f"{value[0]:g} … {value[-1]:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)
