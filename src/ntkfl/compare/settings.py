"""What a comparison is of, and the settings of its methods, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ntkfl.compare.spec import Comparison, Entry
from ntkfl.federation.config import build_method


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
    """The settings of each entry's runs, by label: options that were given or chosen, and any option of its method in
    which another entry of the same method differs.
    """
    methods = {label: build_method(dict(setting)) for label, setting in settings.items()}
    entries = {entry.label: entry for entry in comparison.methods}
    texts = {}
    for label, method in methods.items():
        given = {name: value for name, value in settings[label].items() if name != "name"}
        alike = [other for other in methods.values() if type(other) is type(method)]
        values = {name: {repr(getattr(other, name)) for other in alike} for name in type(method).model_fields}
        shown = given | {name: getattr(method, name) for name, found in values.items() if len(found) > 1}
        words = [f"{name} {_short(value)}" for name, value in shown.items()]
        texts[label] = ", ".join([*words, *_aside(entries[label])]) or "defaults"
    return texts


def _aside(entry: Entry) -> list[str]:
    """What an entry has otherwise than the comparison, beside the options of its method."""
    words = [f"{name} {_short(getattr(entry.privacy, name))}" for name in sorted(entry.privacy.model_fields_set)]
    if entry.robust == "on":
        words.append("robust")
    else:
        bounds = entry.robust
        words += [f"robust {name} {_short(getattr(bounds, name))}" for name in sorted(bounds.model_fields_set)]
    if entry.clients_per_round is not None:
        words.append(f"{entry.clients_per_round} clients per round")
    if entry.model is not None:
        words.append(f"network {entry.model.name}")
    if entry.byzantine is not None:
        words.append(f"{entry.byzantine.fraction:.0%} of clients Byzantine: {entry.byzantine.kind}")
    return words


def _short(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 3:
        return f"{value[0]:g} … {value[-1]:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)
