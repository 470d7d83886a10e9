"""The place of a run's checkpoints, as the supervisor of a node sees it: tried before any worker starts.

It is a directory or an object store (`--checkpoints`), or else a folder in the run's own. Snapshots are for all nodes,
so all must see one and the same place; their histories go there too, since `--out` may be local to each.

Where a run's first weights come from: looked at once, before anything is made, and remembered by the run's folder.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.checkpoint import snapshot, terms
from holdfast.checkpoint.place import store_at, store_for
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.checkpoint.terms import Term
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import JSON, Judged
from holdfast.history import gather
from holdfast.runs.config import RUN, WeightsSource, read_config
from holdfast.supervise.child_call import Aside
from holdfast.supervise.verdict import completion

ANSWERS_WITHIN = 30.0
SENT_WITHIN = 120.0


class PlaceContents(NamedTuple):
    """What a place holds when a supervisor comes: its newest snapshot, and what histories there tell.

    That is the last attempt, and the verdict on it if it was completed.
    """

    newest: int | None
    attempt: int
    completed: Judged | None = None


@dataclass(slots=True, eq=False)
class Checkpoints:
    """Where the snapshots of the run in the folder `out` are: at a place of their own, or in that folder."""

    out: Path
    place: str | None
    _under_way: list[Aside] = field(default_factory=list, init=False)
    wrong: str | None = field(default=None, init=False)  # why this node cannot use them

    def __str__(self) -> str:
        return self.place or str(self.out / "checkpoints")

    def try_out(self, *, alone: bool) -> PlaceContents:
        """Refuse a place that cannot be written, or that is not where the run's snapshots are; else say what is there.

        One of several nodes refuses when it meets the others, so that they do not wait for it.
        """
        try:
            return self._found()
        except HoldfastError as error:
            if alone:
                raise
            self.wrong = str(error)
            return PlaceContents(None, 0)

    def _found(self) -> PlaceContents:
        if self.place is None:
            found = PlaceContents(self.newest(), 0)
        else:
            told: Any = self._ask(_looked, store_for)
            found = PlaceContents(told[0], told[1], _judged(told[2]))
        if found.newest is None:
            self._check_not_moved()
        return found

    def newest(self) -> int | None:
        """The step of the newest snapshot; nothing if there is none, or if the storage does not say."""
        with suppress(HoldfastError, OSError, ValueError):
            found = self._ask(_newest) if self.place else _newest(DirectoryStore(str(self)))
            return found if isinstance(found, int) else None
        return None

    def completed(self) -> Judged | None:
        """The verdict on the last attempt that histories at a place of its own tell of, if that was completed."""
        if self.place is None or self.wrong:
            return None
        return _judged(self._ask(_completed))

    def term(self) -> Term | None:
        """The newest term of the run's nodes."""
        if self.wrong:
            return None
        found = self._ask(lambda store: term.to_json() if (term := terms.newest(store)) else None)
        return Term.from_json(found) if found else None

    def take(self, term: Term) -> bool:
        """Take a term; not if another part of the nodes was quicker."""
        return bool(self._ask(lambda store: terms.take(store, term)))

    def give_back(self, term: Term) -> None:
        """Undo it: nobody has started."""
        self._ask(lambda store: terms.give_back(store, term.number))

    def find(self, term: Term) -> None:
        """Refuse unless the term that a node took is where we look."""
        if self.term() != term:
            raise BadInput(f"what another node writes to {self} is not there: {self._advice}.")

    def send(self) -> None:
        """Begin to send this folder's histories there, if it is a place of its own; one sending at a time."""
        self._under_way = [each for each in self._under_way if not each.is_over()]
        if self.place is not None and not self._under_way:
            self._under_way.append(self._aside(lambda store: gather.send(self.out / "history", store)))

    def settle(self) -> None:
        """Wait for what we began."""
        while self._under_way:
            self._under_way.pop(0).result(SENT_WITHIN)

    @property
    def _advice(self) -> str:
        if self.place is None:
            return (
                "--out is not shared by the nodes. Give --checkpoints, a directory or s3://... that all of them reach"
            )
        return "--checkpoints must be one place that all nodes reach"

    def _check_not_moved(self) -> None:
        """Refuse an empty place for a run that has snapshots elsewhere: it would begin anew without a word."""
        if not (self.out / "run.json").exists():
            return
        before = Checkpoints(self.out, read_config(self.out).checkpoints)
        if str(before) != str(self) and before.newest() is not None:
            raise BadInput(
                f"the snapshots of this run are at {before}, and {self} holds none: give --checkpoints {before}."
            )

    def _ask(self, work: Callable[[Store], JSON], opened: Callable[[str], Store] = store_at) -> JSON:
        return self._aside(work, opened).result(ANSWERS_WITHIN)

    def _aside(self, work: Callable[[Store], JSON], opened: Callable[[str], Store] = store_at) -> Aside:
        _import(str(self))  # here: else each of these processes would do it again
        return Aside(lambda: work(opened(str(self))), str(self))


def local(out: Path) -> Path:
    """The folder of a run, in full; a URL is refused, since a run's histories and logs are files that grow."""
    if scheme := re.match(r"([A-Za-z][\w+.-]*):/", str(out)):
        raise BadInput(
            f"--out is a folder of this machine, and cannot be {scheme[1]}://...: give that as --checkpoints instead."
        )
    return _resolved(out, "--out")


def settled(place: str | None) -> str | None:
    """The place as it is called from everywhere: a directory by its full path."""
    return place if place is None or "://" in place else str(_resolved(Path(place), "--checkpoints"))


def _resolved(path: Path, option: str) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links; which of the two depends on the version of Python
        raise BadInput(f"{option} {path} leads nowhere, by links that go in a circle: name another folder.") from error


def _newest(store: Store) -> int | None:
    return max(snapshot.steps(store), default=None)


def _looked(store: Store) -> JSON:
    return [_newest(store), gather.last_attempt(store), _completed(store)]


def _completed(store: Store) -> JSON:
    found = completion(gather.supervised(store))
    return list(found) if found else None


def _judged(told: Any) -> Judged | None:
    return Judged(*told) if told else None


def _import(place: str) -> None:
    """Have the client of an object store imported before workers are forked: it takes a second, and starts no thread."""
    if "://" in place:
        import fsspec

        with suppress(ImportError, ValueError):  # opening it says what is wrong
            fsspec.get_filesystem_class(place.partition("://")[0])


READ_WITHIN = 3600.0


def beginning(wished: WeightsSource | None, out: Path, *, has_begun: bool) -> WeightsSource | None:
    """The source that the run in this folder began with, if it has; or else the one that is wished for, as it is now.

    A source that is no longer there, or has changed, is no obstacle to a run that has saved a step. It is read in a
    process of its own: to read tensors may start threads, which no fork survives.
    """
    before = read_config(out).source if has_begun and (out / RUN).exists() else None
    if before and (wished is None or wished.wish == before.wish):
        return before
    if wished is None:
        return None
    if wished.place == str(out):
        raise BadInput(f"{out} cannot start from its own weights: name another --out, or leave out --init-from.")
    told = Aside(lambda: _look(wished), wished.place).result(READ_WITHIN)
    return WeightsSource.from_json(told)


def _look(wished: WeightsSource) -> JSON:
    from holdfast.weights.initial import resolve

    return resolve(wished).to_json()
