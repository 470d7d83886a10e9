"""Figures of matplotlib as pictures: SVG that follows the colours of the page, PNG, and PDF with its fonts embedded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

from holdfast.report.page import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is written and what is drawn faintly, in figures of ours. In the SVG of a page these become its own colours.
INK, FAINT = "#24282e", "#e3e6ea"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}
DOTS = 150  # an inch, in a PNG


@contextmanager
def styled() -> Iterator[None]:
    """Figures that are drawn in here look like the page."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        yield


def picture(
    figure: "Figure", *, name: str, title: str, caption: str, alt: str, wide: bool = False, themed: bool = True
) -> Picture:
    """A figure with its words. One that is not `themed` has colours of its own, and stands on white."""
    shown: dict[str, Any] = {"svg": svg(figure, name)} if themed else {"png": png(figure)}
    return Picture(name=name, title=title, caption=caption, alt=alt, wide=wide, figure=figure, **shown)


def png(figure: "Figure") -> bytes:
    """The figure in dots."""
    return _saved(figure, "png", {})


def pdf(figure: "Figure") -> bytes:
    """The figure as a document; type 42 embeds the fonts themselves, where venues refuse those of type 3."""
    return _saved(figure, "pdf", {"pdf.fonttype": 42})


def svg(figure: "Figure", name: str) -> str:
    """The figure as an element of a page, with the page's fonts and colours; its ids begin with `name`."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            text, format="svg", bbox_inches="tight", pad_inches=0.02, transparent=True, metadata={"Date": None}
        )
    found = re.search(r'<svg [^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', text.getvalue(), flags=re.S)
    assert found is not None
    box, inner = found.groups()
    inner = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", inner, flags=re.S)
    inner = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", inner)
    inner = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--font)", inner)
    inner = inner.replace("xlink:href", "href").replace(INK, "currentColor").replace(FAINT, "var(--line)")
    inner = re.sub(r"\s*\n\s*", "\n", inner).strip()
    return f'<svg class="figure" viewBox="{box}" fill="none" aria-hidden="true">{inner}</svg>'


def _saved(figure: "Figure", form: str, settings: dict[Any, Any]) -> bytes:
    """Tight: what a legend needs beyond the size of the figure is added to it, not cut off."""
    from matplotlib import rc_context

    data = BytesIO()
    with rc_context(settings):
        figure.savefig(data, format=form, dpi=DOTS, bbox_inches="tight", pad_inches=0.1)
    return data.getvalue()
