"""The grammar of the option `--inject` of `holdfast run`, `holdfast serve train` and `holdfast rehearse`.

    holdfast run          KIND@STEP[:POINT][,rank=RANKS]       kill@120   kill@50+110:backward=0.5,rank=1+3   flip@90:moment=30
    holdfast serve train  kill@ITERATION[:POINT][,WHO=NUMBERS]  kill@7,node=1+2   kill@7:checkpoint,worker=0   kill@5,controller
    holdfast rehearse     random=COUNT[,seed=SEED]             random=3   random=5,seed=7

A plus sign separates several steps, ranks, nodes or workers. Kinds and points are described in `points` and `storage`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.errors import BadInput
from holdfast.faults.schedule import Failure, Schedule

_NUMBERS = r"[0-9]{1,12}(?:\+[0-9]{1,12})*"
_STRIKE = re.compile(
    rf"(?P<kind>[a-z-]+)@(?P<steps>{_NUMBERS})(?::(?P<point>[^,]+))?(?:,(?P<group>[a-z]+)(?:=(?P<members>{_NUMBERS}))?)?"
)
_RANDOM = re.compile(r"random=(?P<count>[0-9]{1,6})(?:,seed=(?P<seed>[0-9]{1,12}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKills:
    """Settings of a test that kills workers at `count` random steps. Without a `seed`, a random seed is drawn."""

    count: int = 3
    seed: int | None = None


def parse_training(specs: Iterable[str]) -> Schedule:
    """Parse the values of `holdfast run --inject` into failures, sorted by step."""
    failures: list[Failure] = []
    for text in specs:
        for step, kind, point, group, members in _parse_one(text, "kill@120 or kill@120:backward=0.5,rank=1+3"):
            if group not in ("", "rank") or (group and not members):
                raise BadInput(
                    f"--inject {text} does not name ranks: a failure of a run strikes ranks. Write {kind}@{step},rank=1+3."
                )
            failures.append(Failure(step=step, kind=kind, point=point, targets=members or (0,)))
    return tuple(sorted(failures, key=lambda failure: failure.step))


def parse_server(specs: Iterable[str]) -> Schedule:
    """Parse the values of `holdfast serve train --inject`; the kind of a failure is the kind of process it kills."""
    failures: list[Failure] = []
    for text in specs:
        for step, kind, point, group, members in _parse_one(text, "kill@7, kill@7,node=1+2 or kill@5,controller"):
            if kind != "kill":
                raise BadInput(
                    f"--inject {text} asks for {kind!r}: processes of a parameter server can only be killed. "
                    f"Write kill@{step}."
                )
            if group not in ("", "node", "worker", "controller") or bool(members) != (group in ("node", "worker")):
                raise BadInput(
                    f"--inject {text} does not say which process is killed. "
                    f"Write kill@{step},node=1+2, kill@{step},worker=0 or kill@{step},controller."
                )
            failures.append(Failure(step=step, kind=group or "node", point=point, targets=members or (0,)))
    return tuple(failures)


def parse_rehearsal(spec: str) -> RandomKills:
    """Parse the value of `holdfast rehearse --inject`, such as "random=3,seed=7"."""
    match = _RANDOM.fullmatch(spec)
    if match is None:
        raise BadInput(
            f"--inject {spec} is not understood: a rehearsal chooses the steps of its kills itself. "
            "Write random=3 or random=3,seed=7."
        )
    return RandomKills(count=int(match["count"]), seed=None if match["seed"] is None else int(match["seed"]))


def _parse_one(text: str, example: str) -> Iterator[tuple[int, str, str, str, tuple[int, ...]]]:
    """Parse one `--inject` value; yield (step, kind, point, target kind, target numbers) for each of its steps."""
    match = _STRIKE.fullmatch(text)
    if match is None:
        raise BadInput(f"--inject {text} is not understood: it names a kind of failure and a step. Write {example}.")
    members = tuple(sorted({int(number) for number in (match["members"] or "").split("+") if number}))
    for step in map(int, match["steps"].split("+")):
        yield step, match["kind"], match["point"] or "boundary", match["group"] or "", members
