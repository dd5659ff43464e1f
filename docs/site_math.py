"""Formulas of the documentation, typeset: plain text in the Markdown, MathML on the site.

The pages write formulas as code, `w(t) = w0 − (I − e^{−tC}) C⁻¹ g`, which reads well in an editor and in a repository. Every current
browser draws MathML by itself, so no script and no font is fetched.

What is written: `_x`, `_{…}`, ₀ and a digit after a single letter (d2) are subscripts; `^x`, `^{…}`, `^(…)`, ² and ᵀ are superscripts; Σ is a sum;
√ takes what follows. A word of several letters stands upright.
"""

from __future__ import annotations

import html
import re
import unicodedata
from typing import Any

_SUPER, _SUB = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀᵗⁿ", "₀₁₂₃₄₅₆₇₈₉"
_TOKEN = re.compile(
    rf"(?P<space>\s+)|(?P<super>[{_SUPER}]+)|(?P<sub>[{_SUB}]+)|(?P<number>\d[\d,]*(?:\.\d+)?(?:e[-−]?\d+)?)"
    r"|(?P<word>[A-Za-z]{2,}\d*)|(?P<indexed>[A-Za-z]\d+)|(?P<letter>[^\W\d_][\u0300-\u036f]*)|(?P<mark>.)"
)
_MATHS = re.compile(r"[Σ∫∂∇∈⊗∘√⟨⟩‖½ᵀ≈≤≥∞−·×←Α-Ωα-ω⁻²₀₁₂]|[\w)]\^[\w({]|_\{")
_CODE = re.compile(r"[\"\\;─►│`$#]|--|::|ntkfl|\w\.\w+\(|[a-z]{2,}_[a-z]{2,}|[A-Za-z]=[A-Za-z\d]|/\w+/|https?:")
_SYMBOL = re.compile(r"[A-Za-z](?:_\w{1,2}|\d)?")
_INLINE = re.compile(r"<code>([^<]*)</code>")
_BLOCK = re.compile(r'<div class="highlight"><pre><span></span><code>([^<]*)</code></pre></div>')


def on_page_content(content: str, **_: Any) -> str:
    """Every formula of a page; symbols by themselves too, on pages that have several formulas."""
    content = _BLOCK.sub(_block, content)
    inline = [html.unescape(text) for text in _INLINE.findall(content)]
    mathematical = sum(map(is_formula, inline)) >= 3

    def replace(found: re.Match[str]) -> str:
        text = html.unescape(found[1])
        wanted = is_formula(text) or (mathematical and _SYMBOL.fullmatch(text))
        return f'<span class="formula">{mathml(text)}</span>' if wanted else found[0]

    return _INLINE.sub(replace, content)


def is_formula(text: str) -> bool:
    """Whether code is mathematics: it has a sign that no program here uses, and none of a program's own."""
    return bool(_MATHS.search(text)) and not _CODE.search(text)


def _block(found: re.Match[str]) -> str:
    """An indented block: a line is formulas, and perhaps words on them, with three or more spaces between."""
    lines = [re.split(r"\s{3,}", line.strip()) for line in html.unescape(found[1]).splitlines() if line.strip()]
    if not lines or not all(is_formula(parts[0]) for parts in lines):
        return found[0]
    shown = [[mathml(p, block=True) if is_formula(p) else html.escape(p) for p in parts] for parts in lines]
    rows = ("".join(f"<span>{part}</span>" for part in parts) for parts in shown)
    return '<div class="formulas">' + "".join(f"<div>{row}</div>" for row in rows) + "</div>"


def mathml(text: str, *, block: bool = False) -> str:
    style = ' displaystyle="true"' if block else ""
    return f'<math{style} alttext="{html.escape(text)}"><mrow>{_Reader(text).row()}</mrow></math>'


class _Reader:
    """Reads a formula from left to right; an atom takes the scripts that follow it."""

    def __init__(self, text: str) -> None:
        found = [(m.lastgroup or "", m[0]) for m in _TOKEN.finditer(text)]
        self.tokens, self.at = found, 0

    def row(self, end: str = "") -> str:
        """Up to the closing sign `end`, which is read too, or to the formula's end."""
        parts: list[str] = []
        while self.at < len(self.tokens):
            kind, text = self.tokens[self.at]
            if text == end:
                self.at += 1
                break
            if kind == "space":
                self.at += 1
                word = parts and parts[-1].startswith("<mi>") and self._next() in ("word", "letter", "indexed")
                parts.append('<mspace width="0.25em"></mspace>' if word else "")
                continue
            parts.append(self.scripted())
        return "".join(parts)

    def scripted(self) -> str:
        """An atom with its sub- and superscript."""
        base = self.atom()
        sub = sup = ""
        while (kind := self._next()) and not (sub and sup):
            text = self.tokens[self.at][1]
            if not sub and (kind == "sub" or text == "_"):
                sub = self._script(kind)
            elif not sup and (kind == "super" or text == "^"):
                sup = self._script(kind)
            else:
                break
        limits = base == "<mo>∑</mo>"
        if sub and sup:
            name = "munderover" if limits else "msubsup"
            return f"<{name}>{base}{sub}{sup}</{name}>"
        if sub:
            name = "munder" if limits else "msub"
            return f"<{name}>{base}{sub}</{name}>"
        return f"<msup>{base}{sup}</msup>" if sup else base

    def atom(self) -> str:
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return f"<mn>{text}</mn>"
        if kind == "indexed":
            return f"<msub><mi>{text[0]}</mi><mn>{text[1:]}</mn></msub>"
        if text == "Σ":
            return "<mo>∑</mo>"
        if kind in ("word", "letter"):
            return f"<mi>{text}</mi>"
        if text == "√":
            inner = self._group("(", ")") if self._is("(") else self.atom()
            return f"<msqrt>{inner}</msqrt>"
        stretchy = ' stretchy="false"' if text in "()[]{}|‖⟨⟩" else ""
        return f"<mo{stretchy}>{html.escape(text)}</mo>"

    def _script(self, kind: str) -> str:
        text = self.tokens[self.at][1]
        self.at += 1
        if kind in ("sub", "super"):
            return f"<mrow>{_Reader(unicodedata.normalize('NFKC', text).replace('-', '−')).row()}</mrow>"
        if self._is("{"):
            return f"<mrow>{self._group('{', '}')}</mrow>"
        if self._is("("):
            inner = self._group("(", ")")
            return f'<mrow><mo stretchy="false">(</mo>{inner}<mo stretchy="false">)</mo></mrow>'
        if self._next() == "word" and len(self.tokens[self.at][1]) == 2:  # two indices: b_ic
            self.at += 1
            first, second = self.tokens[self.at - 1][1]
            return f"<mrow><mi>{first}</mi><mi>{second}</mi></mrow>"
        return self.atom() if self._next() else "<mrow></mrow>"

    def _group(self, opening: str, closing: str) -> str:
        assert self._is(opening)
        self.at += 1
        return self.row(closing)

    def _next(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def _is(self, text: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at][1] == text
