"""Draw the pictures of docs/explanation/: `python tools/draw_recoveries.py` writes an SVG file for each recovery.

A picture has one lane for each process. Time runs from left to right, in steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "docs/explanation"
LEFT, LANE, BOX, TOP, BOTTOM, WIDTH = 116, 54, 32, 16, 34, 860
COLOURS = {
    "trained": ("#2b6cb0", "#ffffff"),
    "again": ("#b794f4", "#1a202c"),
    "waits": ("#e2e8f0", "#2d3748"),
    "state": ("#2f855a", "#ffffff"),
    "other": ("#dd6b20", "#ffffff"),
}
LEGEND = {
    "trained": "training",
    "again": "repeated or computed by a replacement",
    "waits": "waiting or starting",
    "state": "saved state, or a copy of it",
    "other": "changed by the loss",
}


class Box(NamedTuple):
    lane: int
    begin: float
    end: float
    colour: str
    text: str


class Arrow(NamedTuple):
    """An arrow from a lane at a time to another lane at another time."""

    lane: int
    time: float
    to_lane: int
    to_time: float


class Loss(NamedTuple):
    lane: int
    time: float


@dataclass(frozen=True)
class Drawing:
    title: str
    lanes: Sequence[str]
    boxes: Sequence[Box]
    arrows: Sequence[Arrow] = ()
    losses: Sequence[Loss] = ()


def svg(drawing: Drawing) -> str:
    """Return the picture as SVG with a light background of its own, so that it can be read on dark pages too."""
    last = max(box.end for box in drawing.boxes)
    height = TOP + LANE * len(drawing.lanes) + BOTTOM

    def x(time: float) -> float:
        return LEFT + time * (WIDTH - LEFT - 16) / last

    def middle(lane: int) -> float:
        return TOP + LANE * lane + LANE / 2

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="system-ui, '
        'sans-serif" font-size="12.5">',
        f"<title>{escape(drawing.title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#2d3748"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff" stroke="#cbd5e0"/>',
    ]
    for lane, name in enumerate(drawing.lanes):
        y = middle(lane)
        parts.append(f'<text x="14" y="{y + 4:g}" fill="#2d3748">{escape(name)}</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y:g}" x2="{WIDTH - 16}" y2="{y:g}" stroke="#e2e8f0"/>')
    for box in drawing.boxes:
        fill, ink = COLOURS[box.colour]
        left, wide, y = x(box.begin) + 1, x(box.end) - x(box.begin) - 2, middle(box.lane)
        parts.append(
            f'<rect x="{left:.1f}" y="{y - BOX / 2:g}" width="{wide:.1f}" height="{BOX}" rx="4" fill="{fill}"/>'
            f'<text x="{left + wide / 2:.1f}" y="{y + 4:g}" text-anchor="middle" fill="{ink}">{escape(box.text)}</text>'
        )
    for arrow in drawing.arrows:
        down = 1 if arrow.to_lane > arrow.lane else -1
        parts.append(
            f'<line x1="{x(arrow.time):.1f}" y1="{middle(arrow.lane) + down * BOX / 2:g}" x2="{x(arrow.to_time):.1f}" '
            f'y2="{middle(arrow.to_lane) - down * BOX / 2:g}" stroke="#2d3748" stroke-width="1.5" marker-end="url(#tip)"/>'
        )
    for loss in drawing.losses:
        a, b = x(loss.time), middle(loss.lane)
        parts.append(
            f'<path d="M{a - 8:.1f} {b - 8:g}l16 16m0 -16l-16 16" stroke="#c53030" stroke-width="4" fill="none"/>'
            f'<text x="{a + 14:.1f}" y="{b + 4:g}" fill="#c53030">lost</text>'
        )
    used = dict.fromkeys(box.colour for box in drawing.boxes)
    at = 14.0
    for colour in (name for name in LEGEND if name in used):
        y = height - 18
        parts.append(f'<rect x="{at:g}" y="{y}" width="11" height="11" rx="2" fill="{COLOURS[colour][0]}"/>')
        parts.append(f'<text x="{at + 16:g}" y="{y + 10}" font-size="11.5" fill="#4a5568">{LEGEND[colour]}</text>')
        at += 32 + 6.2 * len(LEGEND[colour])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _steps(lane: int, first: int, count: int, begin: float, colour: str = "trained") -> list[Box]:
    return [Box(lane, begin + i, begin + i + 1, colour, f"step {first + i}") for i in range(count)]


DRAWINGS = {
    "restart": Drawing(
        "Restart: all workers return to the newest snapshot and repeat the steps since it",
        ("checkpoints", "rank 0", "rank 1"),
        [
            Box(0, 2, 3.6, "state", "snapshot 51"),
            *_steps(1, 49, 4, 0),
            *_steps(2, 49, 3, 0),
            Box(2, 3, 3.55, "trained", ""),
            Box(1, 4, 5.6, "waits", "new process"),
            Box(2, 4.2, 5.6, "waits", "new process"),
            *_steps(1, 51, 2, 5.6, "again"),
            *_steps(2, 51, 2, 5.6, "again"),
            *_steps(1, 53, 2, 7.6),
            *_steps(2, 53, 2, 7.6),
        ],
        [Arrow(1, 2, 0, 2.15), Arrow(0, 3.5, 1, 5.6)],
        [Loss(2, 3.6)],
    ),
    "replay": Drawing(
        "Replay: a replacement computes the lost share, and the interrupted step is completed exactly",
        ("rank 0", "rank 1", "replacement"),
        [
            *_steps(0, 51, 1, 0),
            *_steps(1, 51, 1, 0),
            Box(0, 1, 2, "trained", "step 52"),
            Box(1, 1, 1.5, "trained", ""),
            Box(0, 2, 5, "waits", "keeps its gradients and waits"),
            Box(2, 1.8, 3.2, "waits", "new process"),
            Box(2, 3.2, 5, "again", "rank 1's share of step 52"),
            *_steps(0, 53, 2, 5.6),
            Box(0, 5, 5.6, "trained", "average"),
            Box(2, 5, 5.6, "trained", "average"),
            *_steps(2, 53, 2, 5.6),
        ],
        [Arrow(0, 2.6, 2, 3.2), Arrow(2, 4.9, 0, 5.15)],
        [Loss(1, 1.58)],
    ),
    "forward": Drawing(
        "Forward: the survivors complete the step without the samples of the lost worker",
        ("rank 0", "rank 1", "rank 2", "replacement"),
        [
            *_steps(0, 51, 1, 0),
            *_steps(1, 51, 1, 0),
            *_steps(2, 51, 1, 0),
            Box(0, 1, 2, "trained", "step 52"),
            Box(1, 1, 2, "trained", "step 52"),
            Box(2, 1, 1.5, "trained", ""),
            Box(0, 2, 3.1, "other", "mean of two"),
            Box(1, 2, 3.1, "other", "mean of two"),
            Box(0, 3.1, 4.6, "other", "step 53: 1/2 each"),
            Box(1, 3.1, 4.6, "other", "step 53: 1/2 each"),
            Box(3, 1.8, 4.6, "waits", "new process"),
            *_steps(0, 54, 2, 4.6),
            *_steps(1, 54, 2, 4.6),
            *_steps(3, 54, 2, 4.6),
        ],
        [Arrow(1, 4.3, 3, 4.6)],
        [Loss(2, 1.58)],
    ),
    "shadow-shards": Drawing(
        "Shadow shards: the next rank has a copy of the lost shard, and gives it to the replacement",
        ("rank 0", "rank 1", "rank 2", "replacement"),
        [
            Box(0, 0, 1.2, "trained", "shard 0"),
            Box(0, 1.2, 2.5, "state", "copy of shard 2"),
            Box(1, 0, 1.2, "trained", "shard 1"),
            Box(1, 1.2, 2.5, "state", "copy of shard 0"),
            Box(2, 0, 1.2, "trained", "shard 2"),
            Box(2, 1.2, 2.5, "state", "copy of shard 1"),
            Box(0, 2.7, 4.9, "waits", "waits in its collective"),
            Box(2, 2.7, 4.9, "waits", "waits in its collective"),
            Box(3, 2.7, 3.5, "state", "shard 1"),
            Box(3, 3.5, 4.9, "again", "step 52 again"),
            *_steps(0, 53, 2, 4.9),
            *_steps(2, 53, 2, 4.9),
            *_steps(3, 53, 2, 4.9),
        ],
        [Arrow(2, 2.3, 3, 2.9), Arrow(2, 3.7, 3, 4.1)],
        [Loss(1, 2.62)],
    ),
    "partial-recovery": Drawing(
        "Partial recovery: the lost shard takes its weights from the next rank and its moments from a snapshot",
        ("rank 0", "rank 1", "rank 2", "checkpoints", "replacement"),
        [
            Box(3, 0, 1.5, "state", "snapshot 50"),
            Box(0, 0, 1, "trained", "step 51"),
            Box(1, 0, 1, "trained", "step 51"),
            Box(2, 0, 1, "trained", "step 51"),
            Box(0, 1, 2, "trained", "step 52"),
            Box(1, 1, 1.4, "trained", ""),
            Box(2, 1, 2, "trained", "step 52"),
            Box(0, 2, 4.6, "waits", "waits in its collective"),
            Box(2, 2, 4.6, "waits", "has rank 1's gathered weights"),
            Box(4, 2, 3.2, "other", "older shard"),
            Box(4, 3.2, 4.6, "again", "step 52"),
            *_steps(0, 53, 2, 4.6),
            *_steps(2, 53, 2, 4.6),
            *_steps(4, 53, 2, 4.6),
        ],
        [Arrow(3, 1.4, 4, 2.2), Arrow(2, 2.5, 4, 2.9)],
        [Loss(1, 1.5)],
    ),
}


if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(svg(drawing))
