"""The choice of the values that take the place of a lost shard under `--recovery partial`, and its record. No I/O."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from holdfast.events import GATHERED, JSON, SNAPSHOT


class RowSource(NamedTuple):
    """The source and the step of the rows of a parameter, or of an optimizer's state of it."""

    origin: str  # GATHERED, SNAPSHOT or SURVIVORS
    step: int  # of the forward that gathered them, or of the snapshot


def choose_weights(
    names: Collection[str], gathered: Mapping[str, int], saved: int | None, untrained: Collection[str]
) -> dict[str, RowSource] | str:
    """Return the source of the lost rows of each parameter in `names`, or the name of a parameter that has none.

    `gathered` has the step in which the next rank last gathered a parameter, and `saved` is the step of the newest
    snapshot (None if there is none). The parameters `untrained` rarely change, so the snapshot is better: a gather may
    round."""
    sources = {}
    for name in names:
        is_gathered = name in gathered and (saved is None or name not in untrained)
        if not is_gathered and saved is None:
            return name
        sources[name] = RowSource(GATHERED, gathered[name]) if is_gathered else RowSource(SNAPSHOT, saved or 0)
    return sources


def to_json(sources: Mapping[str, RowSource], rows: Mapping[str, int]) -> tuple[Mapping[str, JSON], ...]:
    """Return for each source its step, its parameters, and the number of their lost rows, for the history."""
    entries: dict[RowSource, list[str]] = {}
    for name, source in sources.items():
        entries.setdefault(source, []).append(name)
    return tuple(
        {"origin": source.origin, "step": source.step, "rows": sum(rows[name] for name in names), "parameters": names}
        for source, names in sorted(entries.items())
    )
