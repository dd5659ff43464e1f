"""Formulas of the documentation, typeset: plain text in the Markdown, italics, sub- and superscripts on the site.

The pages write formulas as code, `w(t) = w0 − (I − e^{−tC}) C⁻¹ g`, which reads well in an editor and in a repository.
They become plain HTML rather than MathML or pictures: no script or font is loaded from elsewhere, MathML looks uneven
where no font for mathematics is installed, and a long formula wraps on a phone.

What is written: `_x`, `_{…}`, ₀ and a digit after a single letter (d2) are subscripts; `^x`, `^{…}`, `^(…)`, ² and ᵀ
are superscripts. A letter is a variable, two are a product; a longer word stands upright.
"""

from __future__ import annotations

import html
import re
import unicodedata
from typing import Any

_TOKEN = re.compile(
    r"(?P<super>[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀᵗⁿ]+)|(?P<sub>[₀-₉]+)|(?P<word>(?<![A-Za-z])(?:ln|tr|lr|in)(?![A-Za-z])|[A-Za-z]{3,}\d*)|(?P<indexed>[A-Za-z]\d+)"
    r"|(?P<letter>[^\W\d_][\u0300-\u036f]*)|(?P<number>\d+)|(?P<mark>.)",
    re.DOTALL,
)
_MATHS = re.compile(r"[Σ∫∂∇∈⊗∘√⟨⟩‖½ᵀ≈≤≥∞−·×←Α-Ωα-ω⁻²₀₁₂]|[\w)]\^[\w({]|_\{")
_CODE = re.compile(r"[\"\\;─►│`$#]|--|::|ntkfl|\w\.\w+\(|[a-z]{2,}_[a-z]{2,}|[A-Za-z]=[A-Za-z\d]|/\w+/|https?:")
# What can only be mathematics on a page full of it: C, H_i, I/d2, 1/(N d2), f(x).
_SYMBOL = re.compile(r"(?=.*[A-Za-z])(?:[A-Za-z](?![A-Za-z])(?:_\w{1,2}|\d)?|\d+|[ /()+])+")
_ENOUGH = 8  # formulas of a page whose single letters are variables too; elsewhere `x` may be an array's name
_INLINE = re.compile(r"<code>([^<]*)</code>")
_BLOCK = re.compile(r'<div class="highlight"><pre><span></span><code>([^<]*)</code></pre></div>')


def on_page_content(content: str, **_: Any) -> str:
    """Every formula of a page; symbols by themselves too, on pages that have many formulas."""
    content = _BLOCK.sub(_block, content)
    inline = [html.unescape(text) for text in _INLINE.findall(content)]
    mathematical = sum(map(is_formula, inline)) >= _ENOUGH

    def replace(found: re.Match[str]) -> str:
        text = html.unescape(found[1])
        wanted = is_formula(text) or (mathematical and _SYMBOL.fullmatch(text))
        return typeset(text) if wanted else found[0]

    return _INLINE.sub(replace, content)


def is_formula(text: str) -> bool:
    """Whether code is mathematics: it has a sign that no program here uses, and none of a program's own."""
    return bool(_MATHS.search(text)) and not _CODE.search(text)


def _block(found: re.Match[str]) -> str:
    """An indented block: a line is formulas, and perhaps words on them, with three or more spaces between."""
    lines = [re.split(r"\s{3,}", line.strip()) for line in html.unescape(found[1]).splitlines() if line.strip()]
    if not lines or not all(is_formula(parts[0]) for parts in lines):
        return found[0]
    shown = [[typeset(p) if is_formula(p) else html.escape(p) for p in parts] for parts in lines]
    rows = ("".join(f"<span>{part}</span>" for part in parts) for parts in shown)
    return '<div class="formulas">' + "".join(f"<div>{row}</div>" for row in rows) + "</div>"


def typeset(text: str) -> str:
    """A formula as HTML."""
    tokens = [(found.lastgroup or "", found[0]) for found in _TOKEN.finditer(text)]
    return f'<span class="formula">{_row(tokens)}</span>'


def _row(tokens: list[tuple[str, str]]) -> str:
    """Tokens with their scripts."""
    tokens = list(tokens)
    parts = []
    while tokens:
        kind, text = tokens.pop(0)
        if kind in ("sub", "super"):
            parts.append(_script("sub" if kind == "sub" else "sup", html.escape(unicodedata.normalize("NFKC", text))))
        elif text in ("_", "^") and tokens and not tokens[0][1].isspace():
            parts.append(_script("sub" if text == "_" else "sup", _argument(tokens)))
        else:
            parts.append(_atom(kind, text))
    return "".join(parts)


def _argument(tokens: list[tuple[str, str]]) -> str:
    """What stands in a script: a group in braces, one in parentheses (which are shown), or letters in a row."""
    kind, text = tokens.pop(0)
    if text not in ("{", "("):
        if kind == "word" and set(text) <= set("ijr"):  # indices: φ_ijr
            return "".join(_atom("letter", letter) for letter in text)
        shown = _atom(kind, text)
        while kind == "letter" and tokens and tokens[0][0] == "letter":  # b_ic
            shown += _atom(*tokens.pop(0))
        return shown
    closing = "}" if text == "{" else ")"
    depth, inner = 1, []
    while tokens and depth:
        token = tokens.pop(0)
        depth += (token[1] == text) - (token[1] == closing)
        inner.append(token)
    shown = _row(inner[:-1] if depth == 0 else inner)
    return shown if text == "{" else f"({shown})"


def _atom(kind: str, text: str) -> str:
    if kind == "indexed":
        return f"<var>{text[0]}</var>{_script('sub', text[1:])}"
    if kind == "letter" and text != "Σ":
        return f"<var>{text}</var>"
    return html.escape(text)


def _script(name: str, inner: str) -> str:
    return f"<{name}>{inner}</{name}>"
