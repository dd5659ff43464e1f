"""Originals above what attacks made of them, as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ntkfl.atomic import replacing
from ntkfl.audit.finding import ROLES, Finding
from ntkfl.audit.measures import ssim

_CELL = 0.95  # inches


def draw_grid(findings: Sequence[Finding], path: Path, columns: int = 6) -> Path | None:
    """A pair of rows (original, recovered) for each finding with pictures; None where none has."""
    shown = _distinct(findings)
    if not shown:
        return None
    columns = min(columns, *(len(f.images[0]) for f in shown if f.images is not None))
    figure = Figure(figsize=(2.6 + columns * _CELL, len(shown) * 2 * (_CELL + 0.16)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * len(shown), columns, squeeze=False)
    for i, finding in enumerate(shown):
        assert finding.images is not None
        original, recovered = finding.images
        likeness = ssim(original, recovered)
        for row, pictures in enumerate((original, recovered)):
            for column in range(columns):
                axis = axes[2 * i + row][column]
                picture = pictures[column].clamp(0, 1).permute(1, 2, 0).numpy()
                axis.imshow(picture.squeeze(-1) if picture.shape[-1] == 1 else picture, cmap="gray", vmin=0, vmax=1)
                axis.set_xticks([])
                axis.set_yticks([])
                if row:
                    axis.set_xlabel(f"SSIM {likeness[column]:.2f}", fontsize=7.5)
        axes[2 * i][0].set_ylabel("original", fontsize=8, rotation=0, ha="right", va="center")
        words = f"{finding.attack},\n{ROLES[finding.role]}"
        axes[2 * i + 1][0].set_ylabel(words, fontsize=8, rotation=0, ha="right", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png")
    return path


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """One finding an attack: other roles draw the same pictures."""
    first: dict[str, Finding] = {}
    for finding in findings:
        if finding.images is not None:
            first.setdefault(finding.attack, finding)
    return list(first.values())
