"""Histories of tests as the audit reads them when their steps were folded into a segment."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.events import Event, line, parse, rank_of
from holdfast.history.folded import StepRun, items
from holdfast.history.segment import FilePart, HistorySegment, encode


def as_folded(files: Mapping[str, Sequence[Event]], folder: Path) -> Iterator[tuple[str, Event | StepRun]]:
    """Yield what `stream_blocks` does when all lines of the ranks in `files` are in one segment in `folder`."""
    ranks = [name for name in sorted(files) if rank_of(name) is not None]
    parts = [FilePart(name, 0, 1, b"".join(line(*event) for event in files[name])) for name in ranks]
    path = folder / "000001-rank-0-to-9.npz"
    path.write_bytes(encode(parts))
    segment = HistorySegment(path)
    folded = {part.who: part for part in segment.parts}
    for name in sorted(files):
        if name in folded:
            yield from (
                (name, parse(item) if isinstance(item, bytes) else item) for _, item in items(segment, folded[name])
            )
        else:
            yield from ((name, event) for event in files[name])
