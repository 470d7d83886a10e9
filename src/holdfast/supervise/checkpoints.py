"""The place of a run's checkpoints, as the supervisor of a node sees it: tried before any worker starts.

It is a directory or an object store (`--checkpoints`), or else a folder in the run's own. Snapshots are for all nodes,
so all must see one and the same place; their histories go there too, since `--out` may be local to each.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import gathering
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.place import store_for
from holdfast.checkpoint.store import DirectoryStore, Store, read
from holdfast.ddp.config import read_config
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import JSON
from holdfast.supervise.aside import Aside

ANSWERS_WITHIN = 30.0
SENT_WITHIN = 120.0
_TOKEN = "nodes/round"


@dataclass(slots=True, eq=False)
class Checkpoints:
    """Where the snapshots of the run in the folder `out` are: at a place of their own, or in that folder."""

    out: Path
    place: str | None
    _sending: Aside | None = field(default=None, init=False)

    def __str__(self) -> str:
        return self.place or str(self.out / "checkpoints")

    def try_out(self) -> int:
        """Refuse a place that cannot be written; the number of the last attempt of which histories there tell."""
        if self.place is None:
            return 0
        _import(self.place)
        found = self._ask(gathering.last_attempt)  # to open it for saving is to try it
        self._check_not_moved()
        return int(str(found))

    def newest(self) -> int | None:
        """The step of the newest snapshot; nothing if there is none, or if the storage does not say."""
        with suppress(HoldfastError, OSError, ValueError):
            found = self._ask(_newest) if self.place else _newest(DirectoryStore(str(self)))
            return found if isinstance(found, int) else None
        return None

    def leave(self, token: str) -> None:
        """Put down what every other node must find."""

        def put(store: Store) -> None:
            store.put(_TOKEN, [token.encode()])

        self._ask(put)

    def find(self, token: str) -> None:
        """Refuse unless node 0 left this token where we look."""

        def same(store: Store) -> bool:
            try:
                return read(store, _TOKEN) == token.encode()
            except FileNotFoundError:
                return False

        if not self._ask(same):
            raise BadInput(f"what node 0 writes to {self} is not there: {self._advice}.")

    def forget(self) -> None:
        """Take the token away."""
        self._ask(lambda store: store.remove(_TOKEN))

    def send(self) -> None:
        """Begin to send this folder's histories there, if it is a place that others see."""
        if self.place is not None and self._sending is None:
            self._sending = self._aside(lambda store: gathering.send(self.out / "history", store))

    def sent(self) -> None:
        """Wait until what we began to send is there."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result(SENT_WITHIN)

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
        if str(before) != str(self) and self.newest() is None and before.newest() is not None:
            raise BadInput(f"the snapshots of this run are at {before}, and {self} holds none: name the first.")

    def _ask(self, work: Callable[[Store], JSON]) -> JSON:
        return self._aside(work).result(ANSWERS_WITHIN)

    def _aside(self, work: Callable[[Store], JSON]) -> Aside:
        return Aside(lambda: work(store_for(self.place) if self.place else DirectoryStore(str(self))), str(self))


def local(out: Path) -> Path:
    """The folder of a run, in full; a URL is refused, since a run's histories and logs are files that grow."""
    if scheme := re.match(r"([A-Za-z][\w+.-]*):/", str(out)):
        raise BadInput(
            f"--out is a folder of this machine, and cannot be {scheme[1]}://...: give that as --checkpoints instead."
        )
    return out.resolve()


def settled(place: str | None) -> str | None:
    """The place as it is called from everywhere: a directory by its full path."""
    return place if place is None or "://" in place else str(Path(place).resolve())


def _newest(store: Store) -> int | None:
    return max(snapshot.steps(store), default=None)


def _import(place: str) -> None:
    """Have the client of an object store imported before workers are forked: it takes a second, and starts no thread."""
    if "://" in place:
        import fsspec

        with suppress(ImportError, ValueError):  # opening it says what is wrong
            fsspec.get_filesystem_class(place.partition("://")[0])
