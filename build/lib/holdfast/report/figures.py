"""The figures of a report, drawn with matplotlib, and their conversion to SVG, PNG and PDF."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

from holdfast.cost.compare import stacked_bars
from holdfast.report.page import Picture, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colours of text and of faint lines. In the SVG of a page the page's own colours replace them.
INK, FAINT = "#24282e", "#e3e6ea"
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), FAINT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **{"font.size": 9, "axes.titlesize": 10, "axes.facecolor": "none", "axes.axisbelow": True},
}
DOTS = 150  # per inch, in a PNG
ACCENT, QUIET, LOSS, SAVED = "#3b6fd4", "#a9b1bd", "#c0362c", "#18794e"
WIDTH = 4.5  # inches: fits a phone and half of a wide page
LINE_COLUMNS = 600
LARGEST = 1e100  # the largest loss that is drawn: an axis of much larger numbers overflows


@contextmanager
def styled() -> Iterator[None]:
    """Apply the matplotlib style of report pages to figures that are drawn in the `with` block."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        yield


def picture(
    figure: "Figure", *, name: str, title: str, caption: str, alt: str, wide: bool = False, themed: bool = True
) -> Picture:
    """Return `figure` as a picture for a report page.

    The picture is SVG in the colours of the page if `themed`, else PNG. A `wide` picture has the width of the page.
    `alt` is a description for screen readers."""
    shown: dict[str, Any] = {"svg": svg(figure, name)} if themed else {"png": rendered(figure, "png")}
    return Picture(name=name, title=title, caption=caption, alt=alt, wide=wide, figure=figure, **shown)


def svg(figure: "Figure", name: str) -> str:
    """Return the figure as an SVG element with the fonts and colours of the page; all ids in it begin with `name`."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            text, format="svg", bbox_inches="tight", pad_inches=0.02, transparent=True, metadata={"Date": None}
        )
    match = re.search(r'<svg [^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', text.getvalue(), flags=re.S)
    assert match is not None
    box, inner = match.groups()
    inner = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", inner, flags=re.S)
    inner = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", inner)
    inner = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", inner)
    inner = inner.replace("xlink:href", "href").replace(INK, "currentColor").replace(FAINT, "var(--line)")
    inner = re.sub(r"\s*\n\s*", "\n", inner).strip()
    return f'<svg class="figure" viewBox="{box}" fill="none" aria-hidden="true">{inner}</svg>'


def rendered(figure: "Figure", form: str) -> bytes:
    """Return the figure as the content of a file in the format `form`, such as "png" or "pdf"."""
    from matplotlib import rc_context

    data = BytesIO()
    with rc_context({"pdf.fonttype": 42}):  # TrueType, because some venues refuse type 3
        figure.savefig(data, format=form, dpi=DOTS, bbox_inches="tight", pad_inches=0.1)
    return data.getvalue()


def goodput(values: Mapping[str, float], baseline: str) -> "Figure":
    """Draw a bar for each run: its committed steps per second, with the gain over `baseline`, whose bar is grey."""
    from matplotlib.figure import Figure

    with styled():
        sheet = Figure(figsize=(WIDTH, 0.9 + 0.42 * len(values)), layout="constrained")
        axes = sheet.subplots()
        bars = axes.barh(list(values), list(values.values()), color=ACCENT, height=0.6)
        bars[list(values).index(baseline)].set_color(QUIET)
        base = values[baseline]
        gains = [
            f" ({value / base - 1:+.1%})" if base > 0 and name != baseline else "" for name, value in values.items()
        ]
        axes.bar_label(
            bars, [f"{value:.3g}{gain}" for value, gain in zip(values.values(), gains, strict=True)], padding=4
        )
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.tick_params(length=0)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel("committed steps per second")
    return sheet


def losses(lines: Mapping[str, Sequence[Point]], failures: Sequence[float] = (), over: str = "step") -> "Figure":
    """Draw a loss curve for each run, with a dashed line at each x in `failures`; `over` labels the x-axis."""
    from matplotlib.figure import Figure

    with styled():
        sheet = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        axes = sheet.subplots()
        axes.grid(visible=True, axis="y")
        for number, (name, points) in enumerate(lines.items()):
            drawn = [(at, max(-LARGEST, min(LARGEST, loss))) for at, loss in points]
            x, y = zip(*thinned_line(drawn, LINE_COLUMNS), strict=True)
            axes.plot(x, y, linewidth=1.4, color=ACCENT if len(lines) == 1 else f"C{number % 10}", label=name)
        for place in failures:
            axes.axvline(place, color=LOSS, linewidth=0.9, linestyle=(0, (2, 3)))
        axes.set_xlabel(over)
        axes.set_ylabel("loss")
        if len(lines) > 1:
            sheet.legend(loc="outside lower center", ncols=min(3, len(lines)), fontsize=8)
    return sheet


def loss_picture(lines: Mapping[str, Sequence[Point]], failures: Sequence[float], over: str) -> Picture:
    """Return a picture of the loss curves `lines`, one for each run, for a report page.

    `failures` are the x positions of dashed lines, and `over` is the unit of the x-axis, such as "step"."""
    marks = f" Dashed: {over}s with a failure." if failures else ""
    ends = "; ".join(f"{name} ends at {points[-1][1]:.4g}" for name, points in lines.items())
    caption, alt = f"The loss of each {over}, as it was recorded.{marks}", f"Loss over {over}s: {ends}."
    return picture(losses(lines, failures, over), name="loss", title="Loss", caption=caption, alt=alt)


def shares(parts: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], unit: str) -> "Figure":
    """Draw a stacked bar for each run; `unit` labels the axis.

    `parts` maps a run's name to the length of each part of its bar, and `colours` maps a part to its colour."""
    from matplotlib.figure import Figure

    with styled():
        sheet = Figure(figsize=(8, 1.3 + 0.5 * len(parts)), layout="constrained")
        axes = sheet.subplots()
        stacked_bars(axes, parts, colours)
        axes.set_xlabel(unit)
        axes.tick_params(length=0)
        sheet.legend(loc="outside lower center", ncols=len(colours), fontsize=8)
    return sheet


def thinned_line(points: Sequence[Point], columns: int) -> list[Point]:
    """Return fewer points to draw: the first, last, lowest and highest in each of `columns` equally wide columns."""
    if len(points) <= columns:
        return list(points)
    left, right = points[0][0], points[-1][0]
    width = (right - left) / columns or 1.0
    kept: list[Point] = []
    column: list[Point] = []
    number = 0
    for point in points:
        place = min(int((point[0] - left) / width), columns - 1)
        if place != number:
            kept += _outline(column)
            column, number = [], place
        column.append(point)
    return kept + _outline(column)


def _outline(points: Sequence[Point]) -> list[Point]:
    if len(points) <= 4:
        return list(points)
    inner = {min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])}
    return sorted({points[0], points[-1], *inner})
