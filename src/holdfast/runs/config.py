"""How a run is to be done: what the command line says, checked once and written beside the run as `run.json`.

Where the first weights of a run come from, as its config says and its folder remembers. Pure.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import xxhash

from holdfast.checkpoint.store import DirectoryStore, read
from holdfast.errors import BadInput, HoldfastError
from holdfast.faults import points
from holdfast.faults.schedule import Failure, Schedule
from holdfast.faults.storage import KINDS
from holdfast.memory import require_room


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WeightsSource:
    """The folder of another run, a safetensors file, a file of `torch.save` or a folder of DCP, as it was at the start.

    `step` is which snapshot of a run it is. `take` names the protected things that are given a state from it, all
    models if there is none; `partial` lets a model keep what the source does not have. `digest` is of all that it gives.
    """

    place: str
    step: int | None = None
    take: tuple[str, ...] = ()
    partial: bool = False
    digest: str = ""

    def __repr__(self) -> str:
        return repr(self.place) + (f" ({self.digest[:8]})" if self.digest else "")

    @property
    def wish(self) -> tuple[str, tuple[str, ...], bool]:
        """What was asked for, before anybody looked at it."""
        return self.place, self.take, self.partial

    def to_json(self) -> dict[str, Any]:
        """The source as JSON values."""
        return {**asdict(self), "take": list(self.take)}

    @classmethod
    def from_json(cls, said: Any) -> "WeightsSource":
        """The inverse of `to_json`."""
        texts = ("place", "digest")
        known = isinstance(said, Mapping) and set(said) == {"place", "step", "take", "partial", "digest"}
        if not (known and all(isinstance(said[name], str) for name in texts)):
            raise BadInput("its source of weights is damaged")
        return cls(**{**said, "take": tuple(said["take"])})


RUN = "run.json"
_LONGEST = 1 << 20  # bytes that it may have: a folder may be a stranger's
WORKER = 16 << 20  # bytes of memory that no worker does without, though it shares most with its supervisor
RECOVERIES = ("restart", "replay", "forward", "skip")
WRITERS = ("overlapped", "blocking")
FAULTS = ("exit", "kill", "hang", "slow", *KINDS)  # of processes, and of storage
# What makes it this run and not another. All else (how many workers, how often to save, what to survive) may change
# when a run is continued: neither the windows nor the state depend on it.
IDENTITY = ("script", "args", "seed", "recovery", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What to train, with how many workers, how to save, and what will break."""

    script: str
    args: tuple[str, ...] = ()
    workers: int = 1
    recovery: str = "restart"
    save_every: int = 50
    writer: str = "overlapped"
    max_inflight: int = 2
    keep_last: int = 2
    max_restarts: int = 3
    seed: int | None = None  # the script's
    failures: Schedule = ()
    spares: int = 0  # workers that wait, ready to take the place of a lost one
    workers_after: tuple[int, ...] = ()
    hang_timeout: float | None = None  # seconds; None: learned from the run's own steps
    checkpoints: str | None = None  # in the run's own folder
    source: WeightsSource | None = None  # of its first weights, if the script does not draw them
    extend: bool = False  # the plan may be longer than that of the run in the folder

    def __post_init__(self) -> None:
        for count in (self.workers, *self.workers_after):
            if count < 1:
                raise BadInput(f"no world can be formed of {count} workers: give 1 or more.")
        _known("recovery", self.recovery, RECOVERIES)
        if self.spares and self.recovery == "restart":
            raise BadInput("a restart has no use for spares: choose replay, forward or skip, or leave them out.")
        if self.workers_after and self.recovery != "restart":
            raise BadInput(
                "workers-after is for restarts, and live recovery makes none: leave it out, and change the number of "
                "workers with `holdfast scale`."
            )
        _known("writer", self.writer, WRITERS)
        for failure in self.failures:
            _known("fault", failure.kind, FAULTS)
            points.check(failure, self.recovery)
        for name, least in (
            ("save_every", 1),
            ("max_inflight", 1),
            ("keep_last", 1),
            ("max_restarts", 0),
            ("spares", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise BadInput(f"{name.replace('_', '-')} is {value}: give {least} or more.")
        if self.hang_timeout is not None and not self.hang_timeout > 0:
            raise BadInput(f"--hang-timeout must be greater than 0 (got {self.hang_timeout:g}).")
        if self.checkpoints == "":
            raise BadInput("checkpoints has no name: give a directory or a URL such as s3://bucket/run.")

    def workers_at(self, restart: int) -> int:
        """How many workers there are after so many restarts; the last entry of `workers_after` stays."""
        if restart == 0 or not self.workers_after:
            return self.workers
        return self.workers_after[min(restart, len(self.workers_after)) - 1]

    def check_world(self, nodes: int) -> None:
        """Refuse what so many nodes with these workers cannot do: fit here, survive alone, or fail at a rank that is not."""
        require_room(max((self.workers, *self.workers_after)) + self.spares, WORKER, "workers", "start fewer.")
        if self.recovery != "restart" and nodes * self.workers < 2:
            raise BadInput(f"one worker has nobody who goes on without it: give --recovery {self.recovery} 2 or more.")
        most = nodes * max((self.workers, *self.workers_after))
        for failure in self.failures:
            if absent := [rank for rank in failure.targets if not 0 <= rank < most]:
                raise BadInput(f"no failure can strike rank {absent[0]}: the ranks of this run are 0 to {most - 1}.")
        points.check_survivors(self.failures, self.recovery, nodes * self.workers)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it this run and not another, as JSON values."""
        return {name: getattr(self, name) for name in IDENTITY} | {"source": self.weights}

    @property
    def fingerprint(self) -> str:
        """A digest of what makes it this run and not another."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.identity).encode())

    @property
    def weights(self) -> str | None:
        """The digest of what the run is to begin with, if its source is settled."""
        return self.source.digest if self.source else None

    def to_json(self) -> dict[str, Any]:
        """The config as JSON values."""
        plain = {**asdict(self), "args": list(self.args), "workers_after": list(self.workers_after)}
        plain["source"] = self.source.to_json() if self.source else None
        return {**plain, "failures": [failure.to_json() for failure in self.failures]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RunConfig":
        """The inverse of `to_json`."""
        names = {field.name for field in fields(cls)}
        if unknown := set(data) - names:
            raise BadInput(f"another version of holdfast wrote it, with {', '.join(sorted(unknown))}")
        lists: dict[str, Any] = {name: tuple(data[name]) for name in ("args", "workers_after") if name in data}
        if not all(isinstance(each, str) for each in (data.get("script"), *lists.get("args", ()))):
            raise BadInput("its script and arguments are not all text")
        failures = tuple(Failure.from_json(each) for each in data.get("failures", ()))
        if data.get("source") is not None:
            lists["source"] = WeightsSource.from_json(data["source"])
        return cls(**{**data, **lists, "failures": failures})


def read_config(out: Path) -> RunConfig:
    """The config of the run in this folder."""
    try:
        return RunConfig.from_json(json.loads(read(DirectoryStore(out), RUN, _LONGEST)))
    except FileNotFoundError as error:
        raise BadInput(f"{out} holds no run: it has no run.json.") from error
    except (HoldfastError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{out / 'run.json'} cannot be read ({error}): name another folder.") from error


_adopted: RunConfig | None = None


def adopt(config: RunConfig) -> None:
    """This process is a worker of a run that is done so."""
    global _adopted
    _adopted = config


def handed_over(out: Path) -> RunConfig:
    """The config of the run that this process works for: what its supervisor handed over, or else the folder's."""
    return _adopted or read_config(out)


def _known(what: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise BadInput(
            f"there is no {what} {word!r}: choose {', '.join(words[:-1])}{' or ' * (len(words) > 1)}{words[-1]}."
        )
