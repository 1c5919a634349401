"""Draws the README's picture, docs/plan-light.svg and docs/plan-dark.svg, from the plan that the README shows.

The pictures are those of the plan's page. An SVG file has no page around it, so the page's colours, which its style
sheet names, are written into the file.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.core.plan import Plan
from shardwise.report.pictures import ledger_bar, memory_timeline, svg
from shardwise.report.template import template_text

SCHEMES = ("light", "dark")
WIDTH, MARGIN, HEAD = 692, 24, 120
"""Points: of the pictures, around them, and of the head."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def files(folder: Path) -> dict[str, Path]:
    """The file of each scheme."""
    return {scheme: folder / f"plan-{scheme}.svg" for scheme in SCHEMES}


def drawn(plan: Plan, scheme: str) -> str:
    """The plan's strategy and figures, and its memory at the peak and through a step."""
    figures = {
        "Memory at the peak": ledger_bar(plan.ledger, plan.capacity_bytes),
        "Memory through one step": memory_timeline(plan),
    }
    parts = [
        _text(40, 17, "600", "ink", plan.line),
        _text(64, 13, "400", "ink", "   ".join(plan.figures)),
        _text(84, 12, "400", "muted", f"{plan.verdict} · {plan.about}"),
    ]
    y = HEAD
    for title, figure in figures.items():
        height = 72 * figure.get_figheight()
        parts += [_text(y, 13, "600", "ink", title), _moved(svg(figure, title), y + 8)]
        y += round(height) + 36
    size = f'width="{WIDTH + 2 * MARGIN}" height="{y}" viewBox="0 0 {WIDTH + 2 * MARGIN} {y}"'
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    paper = '<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>'
    whole = "\n".join([f'<svg {spaces} {size} font-family="{FONT}">', paper, *parts, "</svg>\n"])
    colours = _colours()[scheme]
    return re.sub(r"var\(--(\w+)\)", lambda name: colours[name[1]], whole)


def _colours() -> dict[str, dict[str, str]]:
    """The page's variables in each scheme."""
    rules = re.findall(r":root \{(.*?)\}", template_text("page.css"), re.DOTALL)
    return {
        scheme: dict(re.findall(r"--(\w+): (#\w+)", rule))
        for scheme, rule in zip(SCHEMES, rules, strict=True)
    }


def _text(y: int, size: int, weight: str, colour: str, words: str) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="var(--{colour})"'
    return f'<text x="{MARGIN}" y="{y}" {style} xml:space="preserve">{words}</text>'


def _moved(picture: str, y: int) -> str:
    """A picture within another, whose units are its points."""
    whole = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', picture, count=2)
    return whole.replace("<svg ", f'<svg x="{MARGIN}" y="{y}" ', 1)
