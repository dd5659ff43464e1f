"""The audit as one page: a verdict a role, every finding. Self-contained: it loads nothing."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ntkfl.atomic import write_atomically
from ntkfl.audit.finding import ROLES, Finding
from ntkfl.audit.study import Study

_STYLE = """
:root{color-scheme:light dark;--ink:#1b2126;--soft:#5d6872;--line:#d9dfe4;--back:#fff;--card:#f6f8f9;
--bad:#b3261e;--some:#9a6700;--good:#1a7f37}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa5ae;--line:#333c44;--back:#14181b;--card:#1c2226;
--bad:#ff8a80;--some:#e3b341;--good:#56d364}}
*{box-sizing:border-box}body{margin:0 auto;max-width:60rem;padding:1.2rem;background:var(--back);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.15rem;margin:1.8rem 0 .6rem}
p{margin:.3rem 0}.soft{color:var(--soft);font-size:.9rem}.role{background:var(--card);border-left:4px solid var(--line);
border-radius:6px;padding:.7rem 1rem;margin:.6rem 0}.role b{display:block}.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}th,td{text-align:left;padding:.35rem .6rem;
border-bottom:1px solid var(--line);vertical-align:top}td.n{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}.role.bad{border-color:var(--bad)}.role.some{border-color:var(--some)}
.role.good{border-color:var(--good)}
"""


def write_page(study: Study, title: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(study, title).encode())
    return path


def render(study: Study, title: str) -> str:
    roles = "".join(
        f'<div class="role {_tone(study, role)}"><b>{escape(_sentence(name))}</b>'
        f"<p>{escape(_sentence(study.verdicts[role]))}</p></div>"
        for role, name in ROLES.items()
    )
    rows = "".join(_row(finding) for finding in study.findings)
    settings = ", ".join(f"{name} {value}" for name, value in study.settings.items())
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>
<style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p class="soft">Round {study.capture.round}, {len(study.capture.cohort)} clients. {escape(settings)}</p>
<h2>What each role learns</h2>{roles}
<h2>Every attack</h2>
<div class="wide"><table><thead><tr><th>attack</th><th>role</th><th>recovers</th><th>measure</th><th>value</th>
<th>a guess</th></tr></thead><tbody>{rows}</tbody></table></div>
<p class="soft">Values are means ± standard deviation over trials (pictures, rows or seeds).</p>
</body></html>
"""


def _row(finding: Finding) -> str:
    cells = (finding.attack, ROLES[finding.role], finding.recovers, finding.measure)
    numbers = (f"{finding.mean:.3f} ± {finding.spread:.3f}", f"{finding.guess:.2f}")
    return (
        f'<tr title="{escape(finding.says, quote=True)}">'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "".join(f'<td class="n">{cell}</td>' for cell in numbers)
        + "</tr>"
    )


def _tone(study: Study, role: str) -> str:
    """How bad a role's worst is; a role without any attack has no content, but for a pair that opens masks."""
    if role == "aggregator+shuffler" and study.capture.masked:
        return "bad"
    own = [f for f in study.findings if f.role == role or (role.startswith("aggregator+") and f.role == "aggregator")]
    worst = max((f.success for f in own), default=0.0)
    return "bad" if worst >= 0.5 else "some" if worst >= 0.1 else "good"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
