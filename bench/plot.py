"""Horizontal bar charts as SVG, for the documentation. Pure. The SVG contains no font, no script
and no external reference."""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import NamedTuple

WIDTH, LABELS, VALUES = 860, 330, 110
LINE, BAR, TOP = 22, 14, 48
COLOURS = ("#3465a4", "#cc6600", "#4e9a06", "#75507b", "#888a85")
STYLE = "font-family: sans-serif; font-size: 12px; fill: #2e3436"


class Bar(NamedTuple):
    """One bar. The thin line at its end spans from the lowest to the highest value."""

    label: str
    values: Sequence[float]
    colour: int = 0


def bars(
    title: str,
    unit: str,
    groups: Mapping[str, Sequence[Bar]],
    *,
    form: str = ".0f",
    mark: float = 0.0,
) -> str:
    """Return a chart of groups of bars, each under its name. `mark` is the value at which to draw a
    line through all bars; 0 draws none."""
    largest = max([mark, *(max(bar.values) for group in groups.values() for bar in group)])
    scale = (WIDTH - LABELS - VALUES) / largest
    parts = [
        f'<text x="12" y="24" style="{STYLE}; font-size: 15px; font-weight: '
        f'bold">{escape(title)}</text>'
    ]
    y = TOP
    for name, group in groups.items():
        if name:
            parts.append(
                f'<text x="12" y="{y + BAR}" style="{STYLE}; font-weight: '
                f'bold">{escape(name)}</text>'
            )
            y += LINE
        for bar in group:
            parts.append(_bar(bar, y, scale, unit, form))
            y += LINE
        y += LINE // 2
    if mark:
        x = LABELS + mark * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{y}" stroke="#cc0000" '
            'stroke-dasharray="4 3"/>'
        )
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    page = f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{page}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _bar(bar: Bar, y: int, scale: float, unit: str, form: str) -> str:
    middle, low, high = median(bar.values), min(bar.values), max(bar.values)
    end, centre, first, last = (
        LABELS + middle * scale,
        y + BAR / 2,
        LABELS + low * scale,
        LABELS + high * scale,
    )
    colour = COLOURS[bar.colour % len(COLOURS)]
    return "\n".join(
        (
            f'<text x="{LABELS - 8}" y="{y + 11}" text-anchor="end" '
            f'style="{STYLE}">{escape(bar.label)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{end - LABELS:.1f}" height="{BAR}" '
            f'fill="{colour}"/>',
            f'<line x1="{first:.1f}" y1="{centre}" x2="{last:.1f}" y2="{centre}" '
            'stroke="#2e3436"/>',
            f'<text x="{last + 6:.1f}" y="{y + 11}" style="{STYLE}">{middle:{form}} '
            f"{escape(unit)}</text>",
        )
    )
