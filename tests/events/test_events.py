"""Events: every kind is written as JSON and read back, and damaged events are named."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.events import (
    GATHERED,
    KINDS,
    SNAPSHOT,
    Applied,
    Attempt,
    Chosen,
    Commit,
    Corruption,
    Detect,
    Done,
    Dropped,
    Event,
    Iterate,
    Joined,
    Judged,
    Launch,
    Lost,
    Malformed,
    Moved,
    Open,
    Order,
    Other,
    Plan,
    Preempt,
    Preempted,
    Pushed,
    Reassembled,
    Recover,
    Regroup,
    Restart,
    Restored,
    Save,
    Scale,
    Seconds,
    Serve,
    Step,
    Stopped,
    Straggler,
    Strike,
    Struck,
    What,
    Witnessed,
    from_json,
    line,
    lines,
    parse,
    to_json,
)
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall

STEP = Step(2, 4, 1, 0, 17, 17, Samples.of([3, 4]), Seconds(0.25, 0.5, 0.0))
FULL = STEP._replace(
    state="0f" * 16, reduced=1, held=3, stepped=1, loss=0.125, seconds=Seconds(0.1, 0.2, 0.3, device=True)
)
EVERY_KIND: tuple[What, ...] = (
    Open(2, torn=13),
    Attempt(1, 4, 0, 77),
    Plan(1, 167, 16, 3, (1 << 64) - 1, 50, "overlapped", "0f", data="d0"),
    Order(1, 2, 0, 1, "AwQ="),
    Recover(2, 50, 0, 50, "restored", 0.5, ({"name": "step-00000100/", "why": "bad"},), state="s0"),
    Recover(1, None, 0, 0, "keyed", 0.5),
    STEP,
    FULL,
    Save(1, 50, "blocking", 4096, Stall(waited=0.5, write=0.25), retries=1),
    Commit(1, 50, 4096, 0.5, state="s0"),
    Commit(2, 50, 4096, found=True),
    Strike(1, 60, "kill", 2, "boundary"),
    Strike(1, 60, "flip", 2, "weight=30", "model/weight[4] bit 30"),
    Witnessed(1, 50, "0f", copy="a0"),
    Corruption(1, 100, 50, (0, 1), None, "they differ", ("0f", "a0"), ("a0", "0e")),
    Done(2, 300),
    Preempted(2, 200),
    Stopped(2, 200, left=True),
    Regroup(1, 2, 50, "forward", (0, 1, 3), (2,), (17, 4), kept=1, redone=2, behind=(3,), seconds=0.25, asleep=(4,)),
    Reassembled(
        *(1, 2, 50),
        parameters=({"origin": GATHERED, "step": 49, "rows": 4, "parameters": ["model/weight"]},),
        moments=({"origin": SNAPSHOT, "step": 40, "rows": 4, "parameters": ["optimizer/0"]},),
        rounded="bfloat16",
    ),
    Launch(1, 4, ("train.py", "--fast")),
    Restart(2, 4, newest=50, left=2),
    Detect(1, -1, -1, "peer", "gone", exit=-9, signal="SIGKILL", step=60),
    Straggler(1, 2, 500, 540, 1.5, 0.25),
    Straggler(1, None, 500, 540, 1.5, 0.25, 3),
    Scale(1, 2, 3, 0.5),
    Preempt(1),
    Judged("completed", 2, "all workers have finished"),
    Commit(0, 3, 4096, 0.5, blocks=(1, 4)),
    Serve(0, "mlr-digits", 64, 3, 2, 6, "priority", "1/4", 4, "partial", (1 << 64) - 1, 0, 450.0, 100),
    Iterate(3, 0.125, 1.0, 0.1, 0.5, 0.1, 0.05, 0.05),
    Iterate(4, None, 1.0, 0.1, 0.5, 0.1, 0.05, 0.05),
    Pushed(3, 1, 0, 2, Samples.of([3, 4]), (0, 2)),
    Applied(3, 1, 2, Samples.of([3, 4]), (0, 1), again=1),
    Chosen(4, Samples.of([3, 4]), 4096, 0.25),
    Struck(3, "node", (1, 2), "recovery"),
    Lost(3, 1, "node", 1, "its process died", (3, 4), 19),
    Restored(3, 1, 2, 3, (3, 4), (2, 0), 0.25, size=1.5),
    Dropped(3, 1, (0, 1), Samples.of([3, 4])),
    Joined(3, "worker", 2, 3),
    Moved(3, 0, 3, 4, (3, 4)),
)


@pytest.mark.parametrize("what", EVERY_KIND, ids=lambda what: type(what).__name__)
def test_every_kind_is_read_as_it_was_written(what: What) -> None:
    assert parse(line(1.5, "rank-1", what)) == Event(1.5, "rank-1", what)


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(what) for what in EVERY_KIND} == set(KINDS.values())


def test_a_field_with_its_default_is_left_out() -> None:
    assert "loss" not in to_json(STEP)
    assert "torn" not in to_json(Open(2))
    assert to_json(Open(2, torn=1)) == {"version": 2, "torn": 1}


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.text(max_size=8),
    st.builds(
        Step,
        *(st.integers(0, 2**40) for _ in range(6)),
        samples=st.builds(Samples, st.integers(0, 99)),
        seconds=st.builds(Seconds, numbers, numbers, numbers, st.booleans()),
        state=st.none() | st.text(max_size=5),
        reduced=st.integers(0, 3),
        held=st.integers(0, 3),
        stepped=st.integers(0, 3),
        loss=st.none() | numbers,
    ),
)
def test_the_quick_way_to_write_a_step_writes_what_the_general_one_does(who: str, step: Step) -> None:
    said = {"event": "step", "time": 1.5, "who": who, **to_json(step)}
    plain = json.loads(json.dumps(said), parse_constant=lambda _: None)
    assert json.loads(line(1.5, who, step)) == plain


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    odd: Any = STEP._replace(step=np.int64(17), loss=np.float64(0.5))
    assert parse(line(np.float64(1.5), "rank-1", odd)) == Event(1.5, "rank-1", STEP._replace(loss=0.5))


@pytest.mark.parametrize(
    "what", [what for what in EVERY_KIND if not isinstance(what, Open)], ids=lambda w: type(w).__name__
)
def test_an_event_without_a_required_field_is_malformed_and_names_it(what: What) -> None:
    said = to_json(what)
    for name in [name for name in what._fields if name not in what._field_defaults]:
        lacking = from_json("x" if isinstance(what, Other) else Event(0.0, "", what).kind, _without(said, name))
        assert isinstance(lacking, Malformed)
        assert lacking.why == f"{name} is missing"


def _without(said: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key != name}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("step", value) for value in (None, "17", 17.0, True, -1, 2**63, [17])],
        *[("samples", value) for value in (None, {}, {"count": 2}, {"count": 2**63, "digest": "0" * 32})],
        *[("seconds", value) for value in (None, {}, {"data": 1.0}, {"data": "x", "compute": 1.0, "stall": 0.0})],
        *[("state", 7), ("loss", "low"), ("reduced", -1), ("epoch", math.inf)],
    ],
)
def test_a_field_of_the_wrong_type_is_malformed_and_named(name: str, value: Any) -> None:
    wrong = from_json("step", {**to_json(FULL), name: value})
    assert isinstance(wrong, Malformed)
    assert wrong.why.startswith(f"its {name} is wrong")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("step", None, "null is not a whole number from 0 to 2^63 - 1"),
        ("step", True, "true is not a whole number from 0 to 2^63 - 1"),
        ("samples", 5, "5 is not an object with a count from 0 and a digest of 32 hexadecimal digits"),
        ("seconds", {"data": 1.0}, "compute is missing"),
        ("seconds", {"data": 1.0, "compute": "x", "stall": 0.0}, 'compute: "x" is not a number'),
        ("seconds", {"data": 1e300, "compute": 1.0, "stall": 0.0}, "data: 1e+300 is too large for seconds"),
        ("loss", 10**400, f"1{'0' * 39} is too large"),
        ("state", "", "it is empty"),
    ],
)
def test_the_reason_names_the_expected_json_type(name: str, value: Any, why: str) -> None:
    wrong = from_json("step", {**to_json(FULL), name: value})
    assert isinstance(wrong, Malformed)
    assert wrong.why == f"its {name} is wrong ({why})"


def test_a_negative_stall_is_malformed() -> None:
    wrong = from_json("save", {"attempt": 1, "step": 5, "writer": "blocking", "bytes": 1, "seconds": {"waited": -1.0}})
    assert isinstance(wrong, Malformed)
    assert wrong.why == "its seconds is wrong (waited: -1.0 is below 0)"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, True, -1, 2**70, 10**400, 2.5, "x", [None], [[1]], {"a": 1}, {}])
def test_no_reason_is_one_of_python(kind: str, value: Any) -> None:
    example = next(what for what in EVERY_KIND if isinstance(what, KINDS[kind]))
    for name in example._fields:
        read = from_json(kind, {**to_json(example), name: value})
        if isinstance(read, Malformed):
            assert not re.search("None|True|object is|convert|Exceeds|argument|'", read.why)


def test_unknown_fields_are_ignored() -> None:
    assert from_json("done", {"attempt": 1, "step": 3, "mood": "good"}) == Done(1, 3)


@given(
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(
        st.sampled_from(["attempt", "step", "seconds", "rank"]),
        st.from_type(type(None)) | st.integers() | st.text() | st.lists(st.integers()),
    ),
)
def test_any_text_is_read_as_an_event_or_refused(kind: str, said: dict[str, Any]) -> None:
    assert isinstance(from_json(kind, said), KINDS[kind] | Malformed)


def test_an_unknown_kind_is_kept() -> None:
    assert from_json("eclipse", {"totality": True}) == Other("eclipse", {"totality": True})
    assert parse(line(1.0, "rank-0", Other("eclipse", {"totality": True}))).kind == "eclipse"


TWICE = (
    b'{"event": "done", "time": 1.0, "who": "rank-0", "attempt": 1, "step": 3, "step": 4}',
    b'{"event": "done", "time": 1.0, "who": "rank-0", "who" : "rank-1", "attempt": 1, "step": 3}',
    b'{"event": "done", "time": 1.0, "who": "rank-0", "attempt": 1, "st\\u0065p": 3, "step": 4}',
    line(1.0, "rank-0", FULL).replace(b'"count": 2', b'"count": 2,"count":2'),
    line(1.0, "rank-0", FULL).replace(b'"data": 0.1', b'"data": 0.1, "data": 0.1'),
    line(1.0, "rank-0", FULL).replace(b'"loss"', b'"loss": 0.5, "loss"'),
    line(1.0, "supervisor", Detect(1, 0, 0, "error", "E: x")).replace(b'"kind"', b'"kind": "hang", "kind"'),
    line(1.0, "rank-0", Recover(1, 5, 0, 5, "keyed", 0.5, ({"why": "a: b"},))).replace(b'"why"', b'"why": "c", "why"'),
)


@pytest.mark.parametrize("text", TWICE)
def test_a_line_with_a_repeated_name_is_refused(text: bytes) -> None:
    """Readers of JSON differ in which of the two they take."""
    with pytest.raises(ValueError, match=r"has .* twice"):
        parse(text)


def test_colons_in_a_text_do_not_count_as_names() -> None:
    what = Detect(1, 0, 0, "error", 'RuntimeError: "a": 1, {"kind": 2}', signal="x:y")
    assert parse(line(1.0, "supervisor", what)).what == what
    nested = Other("news", {"a": [{"b": {"c": 1}}, {"b": {"c": 2}}]})
    assert parse(line(1.0, "x", nested)).what == nested


def test_a_step_is_decoded_once_to_find_repeated_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long history is steps: they are not read a second time, more carefully."""
    monkeypatch.setattr(lines, "_CAREFUL", None)
    for step in (STEP, FULL):
        assert parse(line(1.0, "rank-0", step)).what == step
