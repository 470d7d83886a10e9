"""A result as pages to read: `summary.md` for a terminal or a repository, `report.html` for a browser, and figures."""

import base64
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader

from holdfast.lab.result import Claim, Result, environment, prepare, replace_bytes, replace_text, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(result: Result, out: Path) -> Path:
    """Write result.json, summary.md, figures and report.html; returns the path of the report."""
    prepare(out)
    write_json(result, out)
    pictures = {name: _render(figure) for name, figure in result.figures.items()}
    for name, formats in pictures.items():
        for suffix, data in formats.items():
            replace_bytes(out / "figures" / f"{name}.{suffix}", data)
    replace_text(out / "summary.md", summary(result))
    embedded = {name: base64.b64encode(formats["png"]).decode() for name, formats in pictures.items()}
    replace_text(out / "report.html", _page(result, embedded))
    return out / "report.html"


def summary(result: Result) -> str:
    """The result in Markdown: the claims, what to note, the figures, and where the numbers come from."""
    lines = [f"# {result.experiment}", "", "| | claim | expected | measured |", "|---|---|---|---|"]
    lines += [
        f"| {verdict(claim)} | {claim.claim} ({claim.source}) | {expected(claim)} | {measured(claim)} |"
        for claim in result.claims
    ]
    lines += ["", *(f"- {remark}" for remark in result.remarks)]
    lines += ["", *(f"![{name}](figures/{name}.png)" for name in result.figures)]
    lines += ["", "Config: " + ", ".join(f"{key} {value}" for key, value in result.config.items()) + "."]
    return "\n".join([*lines, "Environment: " + environment_line() + ".", ""])


def verdict(claim: Claim) -> str:
    """The word for whether a claim holds."""
    if not claim.resolved:
        return "not resolved"
    return "holds" if claim.holds else "DOES NOT HOLD"


def measured(claim: Claim) -> str:
    """The measured value, with its interval where there is one."""
    if claim.interval is None:
        return f"{claim.measured:.4g}"
    return f"{claim.measured:.3g} ({claim.interval[0]:.3g} to {claim.interval[1]:.3g})"


def expected(claim: Claim) -> str:
    """The expected range in words."""
    low, high = claim.expected
    if low is None or high is None:
        return f"at most {high:g}" if high is not None else f"at least {low:g}" if low is not None else "any"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def environment_line() -> str:
    """Versions and machine in one line."""
    facts = environment()
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    return f"holdfast {facts['holdfast']}, {packages}, Python {facts['python']}, {facts['system']} {facts['machine']}, {facts['cores']} cores"


def _page(result: Result, pictures: dict[str, str]) -> str:
    pages = Environment(loader=PackageLoader("holdfast", "lab"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return pages.get_template("report.html").render(
        result=result,
        pictures=pictures,
        environment=environment_line(),
        verdict=verdict,
        expected=expected,
        measured=measured,
    )


def _render(figure: "Figure") -> dict[str, bytes]:
    formats = {}
    for suffix in ("png", "pdf"):
        buffer = BytesIO()
        figure.savefig(buffer, format=suffix, dpi=150)
        formats[suffix] = buffer.getvalue()
    return formats
