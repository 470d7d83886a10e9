"""Leaves out the drawing of figures, which takes most of the time of a report page."""

import pytest

from holdfast.report import figures


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not convert the figures of pages to SVG, for tests of everything else on them."""
    monkeypatch.setattr(figures, "svg", lambda figure, name: "<svg></svg>")
