"""What runs are of, in a sentence: for tables, charts, the report's head and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ntkfl.federation.byzantine import Byzantine
from ntkfl.methods import METHODS
from ntkfl.methods.robust import Robust
from ntkfl.options import NONE, Options
from ntkfl.privacy.settings import Privacy

Values = Mapping[str, Any]


def caption(config: Values) -> str:
    """Data set, partition, clients, cohort, network, method, and every option that differs from its
    default. `config` has a run's settings as plain values, as its config.toml keeps them, also of a run from Python;
    what it leaves out is left out. Nothing that it names is imported.
    """
    data, model, method = (_table(config, name) for name in ("data", "model", "method"))
    words = [str(data.get("dataset", ""))]
    how = data.get("partition")
    dealt = how if isinstance(how, Mapping) else {**data, "kind": how}
    if dealt.get("kind") not in (None, "client") and ":" not in words[0]:
        kind = f"Dirichlet α = {dealt.get('alpha')}" if dealt["kind"] == "dirichlet" else dealt["kind"]
        words.append(f"{data.get('clients')} clients ({kind})")
    if "clients_per_round" in config:
        words.append(f"{config['clients_per_round']} per round")
    if "class" in model:  # made in Python
        words.append(f"{model['class']} of {model.get('weights')} weights")
    else:
        name = f"head on {model['backbone']}" if model.get("backbone") else str(model.get("name", ""))
        hidden = model.get("hidden") or [100]
        if name == "mlp" and isinstance(hidden, list):
            name += f" with {'-'.join(map(str, hidden))} hidden units"
        words.append(name)
    if method:
        words.append(": ".join(filter(None, [str(method.get("name")), ", ".join(options(config))])))
    return ", ".join(filter(None, words))


def options(config: Values) -> list[str]:
    """Every option of a run's method, privacy, bounds and Byzantine clients that differs from its default, as `name
    value`; of a user's own method every option that was given.
    """
    method = _table(config, "method")
    name = method.get("name")
    if isinstance(name, str) and name in METHODS:
        words = _differing(METHODS[name], method)
    else:
        words = [f"{option} {_short(value)}" for option, value in method.items() if option != "name"]
    words += _differing(Privacy, _table(config, "privacy"))
    bounds = config.get("robust")
    words += ["robust on"] if bounds == "on" else _differing(Robust, _table(config, "robust"))
    if lies := _table(config, "byzantine"):
        words.append(f"Byzantine clients: {', '.join(_differing(Byzantine, lies))}")
    return words


def _differing(kind: type[Options], values: Values) -> list[str]:
    """'name value' of the options in `values` that are not the defaults of `kind`."""
    words = []
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if name in values and _plain(values[name]) != _plain(default):
            words.append(f"{name} {_short(values[name])}")
    return words


def _plain(value: Any) -> Any:
    """A value as files have it, which know lists and the word "none"."""
    return NONE if value is None else list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = [value[0], "…", value[-1]] if len(value) > 3 else value
        return " ".join(map(_short, shown))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(config: Values, name: str) -> Values:
    """A table of the settings; an empty one where a file has something else in its place."""
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}
