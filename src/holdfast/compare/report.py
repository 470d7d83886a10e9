"""The result of a comparison as lines of text and rows of a table. No I/O."""

from collections.abc import Iterator, Mapping, Sequence

from holdfast.compare.leaves import Leaf
from holdfast.compare.state_differences import ChangedTensor, StateComparison
from holdfast.finding import counted

SHOWN = 20  # tensors or values of each kind
LONGEST = 60  # characters of a value
HEADS = ("tensor", "dtype and shape", "differ", "largest difference")


def verdict(found: StateComparison) -> str:
    """Return the result in one line: equal, or different and in how many tensors and values."""
    tensors, values = counted(found.tensors, "tensor"), counted(found.values, "plain value")
    if found.is_equal:
        return f"equal: {tensors}, {found.bytes:,} bytes, the same bits; {values}, the same"
    parts = [
        f"{len(found.changed_tensors)} of {tensors}" if found.changed_tensors else "",
        f"{len(found.changed_values)} of {values}" if found.changed_values else "",
        f"{len(found.only_one) + len(found.only_other)} in one run only" if found.only_one or found.only_other else "",
    ]
    return f"different: {', '.join(filter(None, parts))}"


def rows(found: StateComparison) -> list[tuple[str, str, str, str]]:
    """Return a row with the columns `HEADS` for each of the first tensors that differ."""
    return [_row(changed) for changed in found.changed_tensors[:SHOWN]]


def lines(found: StateComparison, one: str, other: str) -> Iterator[str]:
    """Yield a line for each of the first differences that are not in the table; `one` and `other` name the runs."""
    yield from _rest(found.changed_tensors, "tensor")
    for mine, theirs in found.changed_values[:SHOWN]:
        yield f"{mine.name}: {_cut(mine.text)} and {_cut(theirs.text)}"
    yield from _rest(found.changed_values, "plain value")
    for place, only in ((one, found.only_one), (other, found.only_other)):
        for leaf in only[:SHOWN]:
            yield f"only in {place}: {leaf.name}, {_kind(leaf)}"
        yield from _rest(only, "item")


def settings_line(differing: Mapping[str, tuple[str, str]]) -> str:
    """Return a note that names the settings of the training that differ between the runs."""
    named = [f"{name} ({_cut(mine)} and {_cut(theirs)})" for name, (mine, theirs) in differing.items()]
    return f"note: settings that differ, which are not part of the state: {', '.join(named)}"


def _row(changed: ChangedTensor) -> tuple[str, str, str, str]:
    one, other, bits = changed.one, changed.other, changed.bits
    if bits is None:
        return one.name, f"{one.text} and {other.text}", "", ""
    elements = one.tensor.nbytes // one.tensor.dtype.itemsize if one.tensor else 0
    largest = f"{bits.largest:,}" if isinstance(bits.largest, int) else f"{bits.largest:.3g}"
    return one.name, one.text, f"{bits.count:,} of {elements:,}", largest


def _rest(found: Sequence[object], noun: str) -> Iterator[str]:
    if (rest := len(found) - SHOWN) > 0:
        yield f"and {counted(rest, f'more {noun}')}"


def _kind(leaf: Leaf) -> str:
    return f"a tensor {leaf.text}" if leaf.tensor else _cut(leaf.text)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
