"""Access to a run's checkpoints for the supervisor of a node, and the source of the run's initial weights.

The checkpoints are in a directory or an object store (`--checkpoints`), by default in a folder inside the run's folder.
All nodes must see the same place. Supervisors send their histories there too, since `--out` may be local to each node.
The store is only used in child processes (see `child_call.py`).
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.checkpoint import manifest, terms
from holdfast.checkpoint.place import store_at, store_for
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.checkpoint.terms import Term
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import JSON, Judged, Launch
from holdfast.history import gather
from holdfast.runs.config import RUN, WeightsSource, read_config
from holdfast.supervise.child_call import ChildCall
from holdfast.supervise.verdict import completion

ANSWERS_WITHIN = 30.0
SENT_WITHIN = 120.0
READ_WITHIN = 3600.0


class PlaceContents(NamedTuple):
    """The progress of an earlier part of the run, which a new supervisor reads from the checkpoint store."""

    newest: int | None  # the step of the newest snapshot
    attempt: int  # how often the workers were started
    completed: Judged | None = None  # the final event of a completed run
    command: tuple[str, ...] = ()  # the name and arguments of its script


@dataclass(slots=True, eq=False)
class Checkpoints:
    """Access to the checkpoints of a run. They are in `place` (a directory or URL), or if that is None, inside `out`."""

    out: Path
    place: str | None
    _sending: list[ChildCall] = field(default_factory=list, init=False)
    wrong: str | None = field(default=None, init=False)  # why this node cannot use the place

    def __str__(self) -> str:
        return self.place or str(self.out / "checkpoints")

    def try_out(self, *, alone: bool) -> PlaceContents:
        """Check that checkpoints can be written, and return the progress that the run has saved.

        If checkpoints cannot be written, raise HoldfastError. If there are other nodes (`alone` is False), store the
        message in `wrong` instead."""
        try:
            if self.place is None:
                contents = PlaceContents(self.newest(), 0)
            else:
                data: Any = self._ask(_read_contents, store_for)
                contents = PlaceContents(data[0], data[1], _judged(data[2]), tuple(data[3]))
            if contents.newest is None:
                self._check_not_moved()
            return contents
        except HoldfastError as error:
            if alone:
                raise
            self.wrong = str(error)
            return PlaceContents(None, 0)

    def newest(self) -> int | None:
        """Return the step of the newest snapshot; None if there is none, or the storage does not answer."""
        with suppress(HoldfastError, OSError, ValueError):
            step = self._ask(_newest) if self.place else _newest(DirectoryStore(str(self)))
            return step if isinstance(step, int) else None
        return None

    def newest_here(self) -> int | None:
        """Return the step of the newest snapshot, as `newest` does; for a child process, because it opens the store."""
        return _newest(store_at(str(self)) if self.place else DirectoryStore(str(self)))

    def completed(self) -> Judged | None:
        """Return the final event of the run if another node has uploaded it to `place`, otherwise None."""
        return None if self.place is None or self.wrong else _judged(self._ask(_completed))

    def term(self) -> Term | None:
        """Return the newest term (numbered group of nodes) that was claimed in the checkpoint store; None if none was."""
        data = None if self.wrong else self._ask(lambda store: t.to_json() if (t := terms.newest(store)) else None)
        return Term.from_json(data) if data else None

    def take(self, term: Term) -> bool:
        """Claim `term` (a numbered group of nodes); return False if this number or a higher one was claimed already."""
        return bool(self._ask(lambda store: terms.take(store, term)))

    def give_back(self, term: Term, attempt: int) -> None:
        """Withdraw the claims of `term`, a numbered group of nodes, and of the number `attempt`: they did not start."""
        self._ask(lambda store: terms.give_back(store, term.number, attempt))

    def take_attempt(self, number: int) -> int:
        """Claim a number for the next attempt, `number` or the first free one after it, and return it."""
        answer = self._ask(lambda store: terms.take_attempt(store, number))
        assert isinstance(answer, int)
        return answer

    def require_term(self, term: Term) -> None:
        """Raise BadInput if this node does not use the same checkpoint store as the other nodes.

        Another node has written `term`, the numbered group of nodes that may save, to its store. This node checks that
        its own store has the same term."""
        if self.term() != term:
            advice = "--checkpoints must be one place that all nodes reach"
            if self.place is None:
                advice = "--out is not shared by the nodes. Give --checkpoints, a directory or s3://... that all reach"
            raise BadInput(f"a file that another node wrote to {self} is not there: {advice}.")

    def send(self, until: Mapping[str, int] | None = None) -> None:
        """Start to upload this node's history files to `place` in a child process, unless an upload is in progress.

        With `until`, the rank files are uploaded up to these sizes only (see `gather.send`)."""
        self._sending = [call for call in self._sending if not call.is_done()]
        if self.place is not None and not self._sending:
            self._sending.append(self._call(lambda store: gather.send(self.out / "history", store, until)))

    def finish_sending(self) -> None:
        """Wait for the upload that `send` started; raise its error if it failed."""
        while self._sending:
            self._sending.pop(0).result(SENT_WITHIN)

    def _check_not_moved(self) -> None:
        if not (self.out / "run.json").exists():
            return
        before = Checkpoints(self.out, read_config(self.out).checkpoints)
        if str(before) != str(self) and before.newest() is not None:
            raise BadInput(
                f"the snapshots of this run are at {before}, and {self} holds none: give --checkpoints {before}."
            )

    def _ask(self, work: Callable[[Store], JSON], opened: Callable[[str], Store] = store_at) -> JSON:
        return self._call(work, opened).result(ANSWERS_WITHIN)

    def _call(self, work: Callable[[Store], JSON], opened: Callable[[str], Store] = store_at) -> ChildCall:
        if "://" in str(self):  # import the client here, which takes a second: otherwise each child would do it again
            import fsspec

            with suppress(ImportError, ValueError):  # opening the store reports the reason
                fsspec.get_filesystem_class(str(self).partition("://")[0])
        return ChildCall(lambda: work(opened(str(self))), str(self))


def local_folder(out: Path) -> Path:
    """Return the absolute path of `out`; raise BadInput if it is a URL, because the folder of a run must be local."""
    if scheme := re.match(r"([A-Za-z][\w+.-]*):/", str(out)):
        raise BadInput(
            f"--out is a folder of this machine, and cannot be {scheme[1]}://...: give that as --checkpoints instead."
        )
    return _resolved(out, "--out")


def full_place(place: str | None) -> str | None:
    """Return `place` as an absolute path; a URL or None is returned unchanged."""
    return place if place is None or "://" in place else str(_resolved(Path(place), "--checkpoints"))


def _resolved(path: Path, option: str) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links; which of the two depends on the version of Python
        raise BadInput(f"{option} {path} is a loop of symbolic links: name another folder.") from error


def _newest(store: Store) -> int | None:
    return max(manifest.steps(store), default=None)


def _read_contents(store: Store) -> JSON:
    launches = [what for what in gather.supervisor_events(store) if isinstance(what, Launch)]
    argv = max(launches, key=lambda launch: launch.attempt).argv if launches else ()
    command = [Path(argv[0]).name, *argv[1:]] if argv else []
    return [_newest(store), gather.last_attempt(store), _completed(store), command]


def _completed(store: Store) -> JSON:
    verdict = completion(gather.supervisor_events(store))
    return list(verdict) if verdict else None


def _judged(data: Any) -> Judged | None:
    return Judged(*data) if data else None


def first_weights(wanted: WeightsSource | None, out: Path, *, has_begun: bool) -> WeightsSource | None:
    """Return the source of the run's initial weights, with a digest of them; None if the script initializes them.

    A run with a snapshot (`has_begun`) keeps the source recorded in `out`, unless `wanted` is another source."""
    before = read_config(out).source if has_begun and (out / RUN).exists() else None
    if before and (wanted is None or wanted.request == before.request):
        return before
    if wanted is None:
        return None
    if wanted.place == str(out):
        raise BadInput(f"{out} cannot start from its own weights: name another --out, or leave out --init-from.")

    def read() -> JSON:
        from holdfast.weights.source import resolve

        source = resolve(wanted)
        return [source.to_json(), dict(source.table or {})]

    answer: Any = ChildCall(read, wanted.place).result(READ_WITHIN)
    return replace(WeightsSource.from_json(answer[0]), table=answer[1])
