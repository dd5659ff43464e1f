"""Formulas written as code become italics and scripts; code stays code."""

from __future__ import annotations

import pytest

from tests.docs.hooks import load

HOOK = load("site_math")


def short(text: str) -> str:
    """Variables as they are, subscripts in [], superscripts in {}."""
    page = HOOK.typeset(text).removeprefix('<span class="formula">').removesuffix("</span>")
    for tag, sign in (("<var>", ""), ("</var>", ""), ("<sub>", "["), ("</sub>", "]"), ("<sup>", "{"), ("</sup>", "}")):
        page = page.replace(tag, sign)
    return page


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("w(t) = w0 − (I − e^{−tC}) C⁻¹ g", "w(t) = w[0] − (I − e{−tC}) C{−1} g"),
        ("J ∈ R^{N×d2×d}", "J ∈ R{N×d[2]×d}"),
        ("Σ_ic b_ic b_icᵀ", "Σ[ic] b[ic] b[ic]{T}"),
        ("∫_0^t e^{−a(u+{v})} du", "∫[0]{t} e{−a(u+{v})} du"),
        ("w^(k,t) − λ_min n_in", "w{(k,t)} − λ[min] n[in]"),
        ("‖a‖₂² < 10⁻³", "‖a‖[2]{2} &lt; 10{−3}"),
        ("e^{−t", "e{−t"),  # not closed: shown as far as it goes
    ],
)
def test_scripts(written: str, shown: str) -> None:
    assert short(written).rstrip("}") == shown.rstrip("}")


@pytest.mark.parametrize(
    "code",
    [
        "ntkfl train --lr 0.1",
        "label_smoothing",
        "x",
        'codec="factored"',
        "0.1 · sum_samples",
        "a ──► b",
        "[data]",
        "1e-3",
    ],
)
def test_code_is_no_formula(code: str) -> None:
    assert not HOOK.is_formula(code)
