"""Figures, data frames and plain values as JSON: what programs read where people look at a picture.

Runs INSIDE a sandbox between words.py and kernel.py, in the same namespace. Nothing is imported that the code has not
imported: what is not in ``sys.modules`` has no values here. A figure that is none of the known charts is ``unknown``.
"""

# ruff: noqa: B905  (Python 3.7 has no zip(strict=))

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

CHART = "application/vnd.sloplet.chart+json"
TABLE = "application/vnd.sloplet.data+json"
MOST_JSON = 4 * 1024 * 1024  # bytes; what is longer has no JSON
MOST_VALUES = 200_000  # points of a figure, cells of a frame
MOST_PLAIN = 256 * 1024  # characters of a list's or dict's text up to which it has JSON besides
MOST_NESTED = 60

_UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")
_NUMBERED = re.compile(r"_(?:child|line)(\d+)")
_CONTAINER = re.compile(r"_container(\d+)")


class NoChart(Exception):
    """It is not what it looked like."""


def module(name: str) -> Any:
    return sys.modules.get(name)


def plain(value: Any, depth: int = 0) -> Any:
    """A value that JSON has a word for; TypeError if there is none."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth > MOST_NESTED:
        raise TypeError("nested too deeply")
    if isinstance(value, (list, tuple)):
        return [plain(one, depth + 1) for one in value]
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int, float, bool, type(None))) for key in value):
            raise TypeError("not a name")
        return {key: plain(one, depth + 1) for key, one in value.items()}
    pandas, numpy = module("pandas"), module("numpy")
    if pandas is not None and (value is pandas.NaT or value is getattr(pandas, "NA", pandas.NaT)):
        return None
    if numpy is not None and isinstance(value, numpy.datetime64):
        return None if numpy.isnat(value) else str(value.astype("datetime64[s]"))
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return None if value is getattr(numpy.ma, "masked", None) else plain(value.tolist(), depth + 1)
    dates = module("datetime")
    if dates is not None and isinstance(value, (dates.date, dates.time)):
        return value.isoformat()
    raise TypeError("no JSON")


def told(value: Any) -> Any:
    """The same, for values that must be something: else their text."""
    try:
        return plain(value)
    except TypeError:
        return str(value)


def as_json(value: Any) -> bytes | None:
    raw = json.dumps(value, allow_nan=False).encode("utf-8", "backslashreplace")
    return raw if len(raw) <= MOST_JSON else None


def beside(value: Any, text: bytes) -> dict[str, bytes]:
    """What is told of a value besides its representations. Never fails, and is nothing where it is too much."""
    found: dict[str, Any] = {}
    try:
        figures, pandas = module("matplotlib.figure"), module("pandas")
        frames = getattr(pandas, "DataFrame", None)
        if figures is not None and isinstance(value, figures.Figure):
            found[CHART] = chart_of(value)
        elif frames is not None and isinstance(value, frames):
            found[TABLE] = columns_of(value)
        elif isinstance(value, (list, dict)) and len(text) <= MOST_PLAIN:
            found["application/json"] = plain(value)
        return {mime: raw for mime, raw in ((m, as_json(v)) for m, v in found.items() if v is not None) if raw}
    except Exception:
        return {}


def columns_of(frame: Any) -> dict[str, Any] | None:
    if frame.size > MOST_VALUES:
        return None
    return {str(name): [told(one) for one in frame.iloc[:, at].tolist()] for at, name in enumerate(frame.columns)}


# -- charts -------------------------------------------------------------------------------------------------------


def chart_of(figure: Any) -> dict[str, Any] | None:
    """What is drawn in a figure, by its axes; None if nothing is."""
    import warnings

    axes = figure.get_axes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if len(axes) == 1:
            return None if blank(axes[0]) else chart_in(axes[0])
        if not axes:
            return None
        title = figure._suptitle.get_text() if getattr(figure, "_suptitle", None) is not None else ""
        return {"type": "superchart", "title": title or None, "elements": [chart_in(one) for one in axes]}


def blank(axes: Any) -> bool:
    return not drawn_in(axes) and converter(axes.xaxis) is None and converter(axes.yaxis) is None


def drawn_in(axes: Any) -> list[Any]:
    texts = module("matplotlib.text").Text
    found = getattr(axes, "_children", None)
    if found is None:  # before matplotlib 3.5
        found = [*axes.lines, *axes.patches, *axes.collections, *axes.images, *axes.artists, *axes.tables]
    return [one for one in found if not isinstance(one, texts)]


def chart_in(axes: Any) -> dict[str, Any]:
    title = axes.get_title() or None
    try:
        made: dict[str, Any] = {"title": title, **KINDS[kind_of(axes)](axes)}
    except (NoChart, KeyError):
        made = {"type": "unknown", "title": title, "elements": []}
    return made


def kind_of(axes: Any) -> str:
    lines, patches = module("matplotlib.lines"), module("matplotlib.patches")
    found = drawn_in(axes)
    if all(isinstance(one, lines.Line2D) for one in found):
        return "line"
    if all(isinstance(one, (patches.PathPatch, lines.Line2D)) for one in found):
        return "box_and_whisker"
    found = [one for one in found if not (isinstance(one, lines.Line2D) and straight(one))]
    for kind, which in (
        ("scatter", module("matplotlib.collections").PathCollection), ("pie", patches.Wedge), ("bar", patches.Rectangle)
    ):  # fmt: skip
        if all(isinstance(one, which) for one in found):
            return kind
    return "unknown"


def straight(line: Any) -> bool:
    """Whether it is one that only guides the eye: two points, across or upright."""
    xs, ys = list(line.get_xdata()), list(line.get_ydata())
    return len(xs) == 2 and len(ys) == 2 and (bool(xs[0] == xs[1]) or bool(ys[0] == ys[1]))


def labelled(axes: Any, swapped: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, label in zip("yx" if swapped else "xy", (axes.get_xlabel(), axes.get_ylabel())):
        unit = _UNIT.search(label)
        found[name + "_label"] = label or None
        found[name + "_unit"] = (unit.group(1) or unit.group(2)) if unit else None
    return found


def converter(axis: Any) -> Any:
    get = getattr(axis, "get_converter", None)
    return axis.converter if get is None else get()


def of_dates(axis: Any) -> bool:
    dates = module("matplotlib.dates")
    kinds = [getattr(dates, name, None) for name in ("_SwitchableDateConverter", "DateConverter")]
    return any(kind is not None and isinstance(converter(axis), kind) for kind in kinds)


def day(number: Any) -> str:
    return str(module("matplotlib.dates").num2date(number).isoformat())


def scaled(name: str, axis: Any) -> dict[str, Any]:
    labels = [label.get_text() for label in axis.get_ticklabels()]
    dated = of_dates(axis)
    ticks = [day(tick) if dated else placed(tick) for tick in axis.get_ticklocs()]
    scale = axis.get_scale()
    pairs = list(zip(ticks, labels))
    if dated:
        scale = "datetime"
    elif scale == "linear" and pairs and all(tick == at and text != str(at) for at, (tick, text) in enumerate(pairs)):
        scale = "categorical"
    return {name + "_ticks": ticks, name + "_tick_labels": labels, name + "_scale": scale}


def points_of(label: Any, pairs: Any) -> dict[str, Any]:
    return {"label": str(label), "points": [[placed(x), placed(y)] for x, y in pairs]}


def placed(at: Any) -> Any:
    """Where something is on an axis: a number, or a text."""
    found = told(at)
    return float(found) if isinstance(found, int) else found


def counted(number: int) -> None:
    if number > MOST_VALUES:
        raise OverflowError


def line(axes: Any) -> dict[str, Any]:
    elements = []
    drawn = [one for one in axes.get_lines() if not straight(one)]
    counted(sum(len(one.get_xdata()) for one in drawn))
    for one in drawn:
        number = _NUMBERED.fullmatch(str(one.get_label()))
        label = one.get_label() if number is None else "Line " + number.group(1)
        elements.append(points_of(label, zip(list(one.get_xdata()), list(one.get_ydata()))))
    return {"type": "line", **points_chart(axes), "elements": elements}


def points_chart(axes: Any) -> dict[str, Any]:
    return {**labelled(axes), **scaled("x", axes.xaxis), **scaled("y", axes.yaxis)}


def scatter(axes: Any) -> dict[str, Any]:
    by_day = [of_dates(axis) for axis in (axes.xaxis, axes.yaxis)]
    counted(sum(len(one.get_offsets()) for one in axes.collections))
    elements = []
    for one in axes.collections:
        pairs = ([day(at) if dated else at for at, dated in zip(pair, by_day)] for pair in one.get_offsets().tolist())
        elements.append(points_of(one.get_label(), pairs))
    return {"type": "scatter", **points_chart(axes), "elements": elements}


def bar(axes: Any) -> dict[str, Any]:
    groups = [one for one in axes.containers if hasattr(one, "patches") and len(one.patches)]
    if not groups:
        raise NoChart
    counted(sum(len(one.patches) for one in groups))
    lying = [orientation(group) == "horizontal" for group in groups]
    elements = []
    for group, across in zip(groups, lying):
        number = _CONTAINER.fullmatch(str(group.get_label()))
        called = str(group.get_label()) if number is None else "Group " + number.group(1)
        spans = [(box.get_y(), box.get_height()) if across else (box.get_x(), box.get_width()) for box in group.patches]
        values = [float(box.get_width() if across else box.get_height()) for box in group.patches]
        for label, value in zip(names_of(axes.yaxis if across else axes.xaxis, spans), values):
            elements.append({"label": label, "group": called, "value": told(value)})
    return {"type": "bar", **labelled(axes, swapped=all(lying)), "elements": elements}


def orientation(group: Any) -> str:
    known = getattr(group, "orientation", None)
    if known is None:
        known = "horizontal" if len({box.get_height() for box in group.patches}) == 1 else "vertical"
    return str(known)


def names_of(axis: Any, spans: list[Any]) -> list[str]:
    """What the ticks call the bars: each its own, or the one that is under it, or where it stands."""
    texts = [label.get_text() for label in axis.get_ticklabels()]
    if len(texts) == len(spans):
        return texts
    ticks = list(zip(axis.get_ticklocs(), texts))
    found = []
    for start, width in spans:
        low, high = min(start, start + width), max(start, start + width)
        found.append(next((text for at, text in ticks if low <= at <= high and text), f"{(low + high) / 2:.6g}"))
    return found


def pie(axes: Any) -> dict[str, Any]:
    counted(len(axes.patches))
    elements = [
        {"label": str(one.get_label()), "angle": abs(round(float(one.theta2 - one.theta1), 4)), "radius": float(one.r)}
        for one in axes.patches
    ]
    return {"type": "pie", "elements": elements}


def near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def box_and_whisker(axes: Any) -> dict[str, Any]:
    """Each box with the lines that touch it: across it the median, from its edges the whiskers, beyond it outliers."""
    lines = [([float(x) for x in one.get_xdata()], [float(y) for y in one.get_ydata()]) for one in axes.lines]
    counted(sum(len(xs) for xs, _ in lines))
    spans = []
    for patch in axes.patches:
        corners = patch.get_path().vertices
        spans.append([(float(min(side)), float(max(side))) for side in (corners[:, 0], corners[:, 1])])
    upright = any(median_of(span, lines) is not None for span in spans)
    if not upright:
        spans, lines = [span[::-1] for span in spans], [pair[::-1] for pair in lines]
    names = names_of(axes.xaxis if upright else axes.yaxis, [(span[0][0], span[0][1] - span[0][0]) for span in spans])
    elements = []
    for name, span in zip(names, spans):
        median = median_of(span, lines)
        if median is None:
            raise NoChart
        elements.append({"label": name, "median": median, **whiskers(span, lines)})
    return {"type": "box_and_whisker", **labelled(axes, swapped=not upright), "elements": elements}


def median_of(span: Any, lines: Any) -> float | None:
    (left, right), (low, high) = span
    for xs, ys in lines:
        level = len(xs) == 2 and near(ys[0], ys[1]) and low <= ys[0] <= high
        if level and near(min(xs), left) and near(max(xs), right):
            return float(ys[0])
    return None


def whiskers(span: Any, lines: Any) -> dict[str, Any]:
    (left, right), (low, high) = span
    least, most, outliers = low, high, []
    for xs, ys in lines:
        if not xs or not all(left <= x <= right and near(x, xs[0]) for x in xs):
            continue
        if len(xs) == 2 and near(max(ys), low):
            least = min(ys)
        elif len(xs) == 2 and near(min(ys), high):
            most = max(ys)
        elif all(y < low or y > high for y in ys):
            outliers += [y for y in ys if y not in outliers]
    return {"min": least, "first_quartile": low, "third_quartile": high, "max": most, "outliers": outliers}


KINDS = {"line": line, "scatter": scatter, "bar": bar, "pie": pie, "box_and_whisker": box_and_whisker}
