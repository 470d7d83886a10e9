"""A page as one HTML file that needs nothing else: styles, script and figures are in it, and it asks no network."""

from base64 import b64encode
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from holdfast.report.page import TONES, Page, Picture
from holdfast.report.timeline import WORDS

REFRESH = 2.0  # seconds after which a live page asks again


def text(page: Page) -> str:
    """The page."""
    return _template().render(page=page, tones=TONES, kinds=WORDS, png=_png, refresh=REFRESH)


@cache
def _template() -> Template:
    pages = Environment(
        loader=PackageLoader("holdfast", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return pages.get_template("page.html")


def _png(picture: Picture) -> str:
    return "data:image/png;base64," + b64encode(picture.png).decode()
