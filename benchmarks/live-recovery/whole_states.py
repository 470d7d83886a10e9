"""The whole states of a sharded run, put together from what its ranks have noted, and compared with each other.

Each rank notes the sum of the digests of its rows. So the sum over the ranks of a replica is a digest of all tensors,
whatever the number of ranks (see struck_sharded.py).
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

States = dict[tuple[int, int], str]
"""A digest of the whole state by attempt and step; of replicas that differ, one digest after the other."""


def whole_states(notes: Path) -> States:
    """Return the states that all ranks of an attempt have noted."""
    found: defaultdict[tuple[int, int], list[dict]] = defaultdict(list)
    for file in sorted(notes.glob("rank-*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else the rank was killed while it wrote
                note = json.loads(line)
                found[note["attempt"], note["step"]].append(note)
    return {where: _state(ranks) for where, ranks in sorted(found.items()) if len(ranks) == ranks[0]["world"]}


def _state(ranks: list[dict]) -> str:
    replicas: defaultdict[int, int] = defaultdict(int)
    for note in ranks:
        replicas[note["replica"]] += note["rows"]
    sums = {f"{rows % 2**64:016x}" for rows in replicas.values()}
    return "+".join(sorted(sums) + sorted({note["shared"] for note in ranks}))


def wrong_states(states: States, reference: dict[int, str], *, is_exact: bool) -> Iterator[str]:
    """Yield what is wrong: replicas that differ, an attempt that began with another state than an earlier one had at
    that step, no final state, and if the run `is_exact`, a state that the failure-free run did not have."""
    last: dict[int, tuple[int, str]] = {}  # by step, the newest attempt that had it
    begun: set[int] = set()
    for (attempt, step), state in states.items():
        where = f"attempt {attempt}, step {step}"
        if state.count("+") > 1:
            yield f"{where}: the replicas differ ({state})"
        if attempt not in begun and step in last and last[step][1] != state:
            yield f"{where}: the attempt began with {state}, but attempt {last[step][0]} had {last[step][1]}"
        if is_exact and state != reference[step]:
            yield f"{where}: the state is {state}, and {reference[step]} in the failure-free run"
        begun.add(attempt)
        last[step] = attempt, state
    if max(reference) not in last:
        yield f"no attempt noted its final state, after step {max(reference)}"
