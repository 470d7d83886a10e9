"""The pages that explain how things work: their drawings are those of the tool, and the files and checks they name exist."""

import re

from docs_links import DOCS
from draw_recoveries import DRAWINGS, svg

from holdfast.audit.snapshot_checks import snapshots_hold_every_row_once
from holdfast.audit.verdicts import CHECKS
from repository import ROOT

PAGES = {path.name: path.read_text() for path in (DOCS / "explanation").glob("*.md")}


def test_every_drawing_is_up_to_date_and_shown_with_a_description() -> None:
    for name, drawing in DRAWINGS.items():
        assert svg(drawing) == (DOCS / f"explanation/{name}.svg").read_text(), "run python tools/draw_recoveries.py"
        (described,) = re.findall(rf"!\[(.*)\]\({name}\.svg\)", PAGES[f"{name}.md"])
        assert len(described.split()) > 10


def test_every_text_of_a_drawing_fits_into_its_box() -> None:
    for drawing in DRAWINGS.values():
        steps = max(box.end for box in drawing.boxes)
        width = {box.text: (box.end - box.begin) * 728 / steps for box in drawing.boxes}
        assert [text for text, room in width.items() if len(text) * 6.6 > room] == []


def test_every_source_file_that_is_named_exists() -> None:
    named = [name for page in PAGES.values() for name in re.findall(r"`([\w/]+\.py)`", page)]
    assert len(named) > 8
    assert [name for name in named if not (ROOT / "src/holdfast" / name).exists()] == []


def test_the_page_on_the_audit_names_every_check() -> None:
    table = PAGES["audit.md"].partition("| check |")[2].partition("\n\n")[0]
    named = [row.split("|")[1].strip().replace(" ", "_") for row in table.splitlines()[2:]]
    assert named == [*CHECKS, snapshots_hold_every_row_once.__name__]
