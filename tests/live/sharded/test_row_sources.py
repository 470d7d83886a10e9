"""Where the values of a lost shard come from, if a gather, a snapshot, both or neither of them has them."""

from holdfast.events import GATHERED, SNAPSHOT
from holdfast.live.sharded.row_sources import RowSource, choose_weights, to_json

NAMES = ("trained", "frozen")


def test_gathered_weights_are_newer_than_a_snapshot_but_frozen_ones_are_exact_in_it() -> None:
    sources = choose_weights(NAMES, {"trained": 7, "frozen": 7}, saved=4, untrained={"frozen"})
    assert sources == {"trained": RowSource(GATHERED, 7), "frozen": RowSource(SNAPSHOT, 4)}


def test_weights_that_no_rank_has_gathered_return_to_the_snapshot() -> None:
    assert choose_weights(NAMES, {"frozen": 7}, saved=0, untrained=()) == {
        "trained": RowSource(SNAPSHOT, 0),
        "frozen": RowSource(GATHERED, 7),
    }


def test_without_a_snapshot_all_weights_must_have_been_gathered() -> None:
    assert choose_weights(NAMES, {"trained": 7}, saved=None, untrained={"frozen"}) == "frozen"
    assert choose_weights(NAMES, {"trained": 7, "frozen": 6}, saved=None, untrained={"frozen"}) == {
        "trained": RowSource(GATHERED, 7),
        "frozen": RowSource(GATHERED, 6),
    }


def test_the_record_counts_the_rows_of_each_source() -> None:
    sources = {"a": RowSource(GATHERED, 7), "b": RowSource(GATHERED, 6), "c": RowSource(GATHERED, 7)}
    assert to_json(sources, {"a": 3, "b": 2, "c": 4}) == (
        {"origin": "gathered", "step": 6, "rows": 2, "parameters": ["b"]},
        {"origin": "gathered", "step": 7, "rows": 7, "parameters": ["a", "c"]},
    )
