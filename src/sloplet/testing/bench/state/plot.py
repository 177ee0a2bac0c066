"""The cost curves as a picture: SVG, both axes logarithmic, written by hand. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..stats import CURVE_SIZES, CURVES
from .plan import OURS, RAW

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 230, 46, 52
_LABEL = 15
#: By curve; told apart also by those who do not see colours: runsc's are dashed, and every line is labelled.
_COLOURS = {
    "snapshot": "#1b6ca8",
    "restore": "#c8553d",
    "checked": "#e8a08f",
    "pause": "#5b8e3e",
    "resume": "#8e5ba6",
    "fork": "#b8860b",
}

_SHORT = {"restore": "restore", "resume": "resume"}


@dataclass(frozen=True)
class Curve:
    label: str
    colour: str
    dashed: bool
    points: tuple[tuple[float, float], ...]  #: MiB, seconds


def curves(data: dict[str, Any]) -> list[Curve]:
    """Those that a report (as JSON) holds, ours and by hand."""
    found = {(one["metric"], one["subject"]): one["summary"]["p50"] for one in data["series"]}
    made = []
    for name, title in CURVES.items():
        for subject in (OURS, RAW):
            points = tuple(
                (float(size), found[f"curve.{name}_{size}", subject])
                for size in CURVE_SIZES
                if (f"curve.{name}_{size}", subject) in found
            )
            if points:
                title = _SHORT.get(name, title)
                label = title if subject == OURS else f"runsc {'checkpoint' if name == 'snapshot' else name}"
                made.append(Curve(label, _COLOURS[name], subject == RAW, points))
    return made


@dataclass(frozen=True)
class _Scale:
    """From values to places, by their logarithm."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.end - self.start)


def draw(data: dict[str, Any]) -> str:
    """The whole SVG file. Without curves, a picture that says so."""
    made = curves(data)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>Time to save and restore a sandbox, against the memory it has touched</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(
            _LEFT, 24, "Time against memory touched (both logarithmic; solid: Sloplet, dashed: runsc by hand)", size=13
        ),
    ]
    if made:
        parts += _figure(made)
    else:
        parts.append(_text(_LEFT, _HEIGHT / 2, "nothing was measured"))
    return "\n".join([*parts, "</svg>", ""])


def _figure(made: Sequence[Curve]) -> list[str]:
    values = [seconds for curve in made for _, seconds in curve.points]
    x = _Scale(CURVE_SIZES[0], CURVE_SIZES[-1], _LEFT, _WIDTH - _RIGHT)
    y = _Scale(_at_most(min(values)), _at_least(max(values)), _HEIGHT - _BOTTOM, _TOP)
    return [*_grid(x, y), *(line for curve in made for line in _line(curve, x, y)), *_labels(made, x, y)]


def _steps() -> Iterable[float]:
    return (digit * 10.0**power for power in range(-6, 7) for digit in (1, 2, 5))


def _at_most(value: float) -> float:
    return max(step for step in _steps() if step <= max(value, 1e-6))


def _at_least(value: float) -> float:
    return min(step for step in _steps() if step > min(value, 1e6))


def _grid(x: _Scale, y: _Scale) -> list[str]:
    bottom, left, right = y(y.low), x(x.low), x(x.high)
    parts = []
    for step in _steps():
        if y.low <= step <= y.high:
            parts.append(_stroke(left, y(step), right, y(step), "#dddddd"))
            parts.append(_text(left - 8, y(step) + 4, _seconds(step), anchor="end"))
    for size in CURVE_SIZES:
        parts.append(_stroke(x(size), bottom, x(size), y(y.high), "#dddddd"))
        parts.append(_text(x(size), bottom + 18, f"{size} MiB", anchor="middle"))
    parts.append(_stroke(left, bottom, right, bottom, "#444444"))
    parts.append(_stroke(left, bottom, left, y(y.high), "#444444"))
    parts.append(_text((left + right) / 2, bottom + 38, "memory touched", anchor="middle"))
    return parts


def _line(curve: Curve, x: _Scale, y: _Scale) -> list[str]:
    places = " ".join(f"{x(size):.1f},{y(seconds):.1f}" for size, seconds in curve.points)
    dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
    return [
        f'<polyline points="{places}" fill="none" stroke="{curve.colour}" stroke-width="2"{dashes}/>',
        *(
            f'<circle cx="{x(size):.1f}" cy="{y(seconds):.1f}" r="3" fill="{curve.colour}"/>'
            for size, seconds in curve.points
        ),
    ]


def _labels(made: Sequence[Curve], x: _Scale, y: _Scale) -> list[str]:
    """Beside the lines' ends, pushed apart where they would cover each other."""
    ordered = sorted(made, key=lambda one: y(one.points[-1][1]))
    places = spread([y(one.points[-1][1]) for one in ordered], _LABEL, _TOP, _HEIGHT - _BOTTOM)
    parts = []
    for curve, place in zip(ordered, places, strict=True):
        end, seconds = curve.points[-1]
        parts.append(_stroke(x(end) + 4, y(seconds), x(x.high) + 14, place, curve.colour, width=0.6))
        parts.append(_text(x(x.high) + 18, place + 4, f"{curve.label}: {_seconds(seconds)}", colour=curve.colour))
    return parts


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted places, moved as little as need be to lie ``gap`` apart and not above ``high``."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap if moved else low))
    for i in range(len(moved) - 1, -1, -1):
        moved[i] = min(moved[i], moved[i + 1] - gap if i + 1 < len(moved) else high)
    return moved


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, colour: str = "#222222") -> str:
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{safe}</text>'
