"""The settings of a run: checked once, and kept in its folder as `run.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
    """The source of a run's initial weights: another run, a Hugging Face or DCP folder, or a weights file.

    `table` has digests of the parts of each tensor. The supervisor passes it to its workers; run.json does not contain
    it."""

    place: str
    step: int | None = None
    take: tuple[str, ...] = ()  # the objects to load; by default all models
    partial: bool = False  # weights that the source lacks are kept
    digest: str = ""
    table: Mapping[str, str] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return repr(self.place) + (f" ({self.digest[:8]})" if self.digest else "")

    @property
    def request(self) -> tuple[str, tuple[str, ...], bool]:
        """The values of --init-from, --init-names and --init-partial that the user gave."""
        return self.place, self.take, self.partial

    def to_json(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _SOURCE}, "take": list(self.take)}

    @classmethod
    def from_json(cls, data: Any) -> "WeightsSource":
        known = isinstance(data, Mapping) and set(data) == set(_SOURCE)
        if not (known and all(isinstance(data[name], str) for name in ("place", "digest"))):
            raise BadInput("its source of weights is damaged")
        return cls(**{**data, "take": tuple(data["take"])})


_SOURCE = ("place", "step", "take", "partial", "digest")
RUN = "run.json"
_LONGEST = 1 << 20  # bytes that are read of a run.json, which may be a stranger's
WORKER = 16 << 20  # bytes of memory that each worker needs, though it shares most with its supervisor
RECOVERIES = ("restart", "replay", "partial", "forward", "skip")
REPLACING = ("replay", "partial")  # live recoveries in which the others wait until a lost worker is replaced
WRITERS = ("overlapped", "blocking")
SLOWEST_NORMAL = 1.25  # the ratio of step times from which a worker counts as slow
FAULTS = ("exit", "kill", "hang", "slow", points.FLIP, *KINDS)  # of processes, memory and storage
# The fields that identify a run. All others (the number of workers, how often to save, how to recover from failures) may
# change when it is continued: neither the samples of a step nor the state depend on them.
IDENTITY = ("script", "args", "seed", "recovery", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a run, for `holdfast.supervise.supervise`. Most of them are options of `holdfast run`."""

    script: str
    """The Python script that each worker runs; with `module`, the name of a module."""
    module: bool = False
    """True to run `script` as `python -m` would, so that it may use relative imports."""
    args: tuple[str, ...] = ()
    """The arguments of the script."""
    workers: int = 1
    """The number of worker processes on each node."""
    recovery: str = "restart"
    """The recovery after a failure: `restart`, or a live recovery: `replay`, `partial`, `forward` or `skip`."""
    save_every: int = 50
    """The number of steps between two snapshots."""
    writer: str = "overlapped"
    """`overlapped` writes snapshots while training continues; `blocking` writes them while training waits."""
    max_inflight: int = 2
    """The largest number of snapshots that the overlapped writer writes at the same time. A further save waits."""
    keep_last: int = 2
    """The number of snapshots to keep."""
    save_bandwidth: int | None = None
    """The most bytes that each worker writes to snapshots in a second, in the background. None: no limit."""
    max_restarts: int = 3
    """The number of failures in a row that the run survives. Each newer snapshot starts the count again."""
    seed: int | None = None
    """The seed of the sample order and of all random numbers. None: the seed that the script sets."""
    failures: Schedule = ()
    """The failures to cause on purpose, as `--inject` does."""
    spares: int = 0
    """The number of extra workers that wait to replace lost workers.

    Under `recovery="restart"`, 1 keeps a second set of all workers ready."""
    workers_after: tuple[int, ...] = ()
    """The number of workers on each node after the first restart, the second restart, and so on. For experiments.

    The last number also holds after all later restarts."""
    hang_timeout: float | None = None
    """The seconds without progress after which a worker counts as hanging. None: computed from the run's own steps."""
    replace_slow: float | None = None
    """A spare replaces a worker that needs this many times as long to compute a step as the other workers of its node.

    The time is compared with the geometric mean of these workers, over many steps. Example: 1.5. None: never."""
    checkpoints: str | None = None
    """The directory or URL of the snapshots. None: the folder of the run."""
    source: WeightsSource | None = None
    """The source of the initial weights. None: the script initializes them."""
    witness_every: int | None = None
    """The number of steps between two comparisons of the states of all ranks, to find flipped bits. None: never."""
    extend: bool = False
    """True to train an existing run for longer: the whole numbers in `args`, such as epochs, may be larger than before."""

    def __post_init__(self) -> None:
        for count in (self.workers, *self.workers_after):
            if count < 1:
                raise BadInput(f"--workers must be 1 or more (got {count}).")
        _check_choice("recovery", self.recovery, RECOVERIES)
        if self.spares > 1 and self.recovery == "restart":
            raise BadInput(
                f"--spares with --recovery restart is 0 or 1, one more set of all workers (got {self.spares})."
            )
        if self.workers_after and self.recovery != "restart":
            raise BadInput(
                "workers_after is for restarts, and live recovery makes none: leave it out, and change the number of "
                "workers with `holdfast scale`."
            )
        _check_choice("writer", self.writer, WRITERS)
        for failure in self.failures:
            _check_choice("fault", failure.kind, FAULTS)
            points.check(failure, self.recovery)
        least_values = {"save_every": 1, "max_inflight": 1, "keep_last": 1, "max_restarts": 0, "spares": 0}
        for name, least in least_values.items():
            if (value := getattr(self, name)) < least:
                raise BadInput(f"--{name.replace('_', '-')} must be {least} or more (got {value}).")
        if self.witness_every is not None and self.witness_every < 1:
            raise BadInput(f"--witness-every must be 1 or more (got {self.witness_every}).")
        if self.witness_every is not None and self.keep_last < 2:
            raise BadInput(
                "--witness-every needs --keep-last 2 or more (got 1): the newest snapshot may be wrong until all ranks have "
                "compared their states."
            )
        if self.hang_timeout is not None and not self.hang_timeout > 0:
            raise BadInput(f"--hang-timeout must be greater than 0 (got {self.hang_timeout:g}).")
        self._check_replace_slow()
        self._check_save_bandwidth()
        if self.checkpoints == "":
            raise BadInput("--checkpoints is empty: give a directory or a URL such as s3://bucket/run.")

    def _check_replace_slow(self) -> None:
        if self.replace_slow is None:
            return
        if not self.replace_slow >= SLOWEST_NORMAL:
            raise BadInput(
                f"--replace-slow must be {SLOWEST_NORMAL:g} or more (got {self.replace_slow:g}): smaller differences are "
                "noise. Try 1.5."
            )
        if self.recovery == "restart" or not self.spares:
            raise BadInput(
                "--replace-slow replaces a slow worker by a spare without a restart: add --spares 1 and a live recovery, "
                "such as --recovery replay."
            )

    def _check_save_bandwidth(self) -> None:
        if self.save_bandwidth is None:
            return
        if self.save_bandwidth < 1:
            raise BadInput(f"--save-bandwidth must be 1 byte a second or more (got {self.save_bandwidth}).")
        if self.writer == "blocking":
            raise BadInput(
                "--save-bandwidth is for saves in the background, and training would wait for slower ones with --writer "
                "blocking: leave one of the two out."
            )

    @property
    def import_folder(self) -> Path:
        """The folder that comes first in `sys.path`: the folder of the script, or with `module` the current folder.

        Python does the same for `python script.py` and `python -m`."""
        return Path.cwd() if self.module else Path(self.script).resolve().parent

    def workers_at(self, restart: int) -> int:
        """Return the number of workers on each node after the run was restarted `restart` times."""
        if restart == 0 or not self.workers_after:
            return self.workers
        return self.workers_after[min(restart, len(self.workers_after)) - 1]

    def check_world(self, nodes: int) -> None:
        """Raise BadInput if these settings do not work with `nodes` nodes, or the workers do not fit into memory."""
        most = max((self.workers, *self.workers_after))
        is_live = self.recovery != "restart"
        require_room(most + self.spares * (1 if is_live else most), WORKER, "workers", "start fewer.")
        if self.spares and not is_live and nodes > 1:
            raise BadInput(f"--spares with --recovery restart needs a single node (got {nodes}): leave it out.")
        if is_live and nodes * self.workers < 2:
            raise BadInput(f"--recovery {self.recovery} needs 2 workers or more, so that one survives (got 1).")
        if self.witness_every is not None and nodes * self.workers < 2:
            raise BadInput("--witness-every compares the states of workers, so it needs 2 or more (got 1).")
        for failure in self.failures:
            if absent := [rank for rank in failure.targets if not 0 <= rank < nodes * most]:
                raise BadInput(
                    f"cannot inject a failure at rank {absent[0]}: the ranks of this run are 0 to {nodes * most - 1}."
                )
        points.check_survivors(self.failures, self.recovery, nodes * self.workers)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that must be the same in every command that continues the run, as JSON values."""
        return {name: getattr(self, name) for name in IDENTITY} | {"source": self.weights}

    @property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self.identity).encode())

    @property
    def weights(self) -> str | None:
        """The digest of the source of initial weights; None if the script initializes them."""
        return self.source.digest if self.source else None

    def to_json(self) -> dict[str, Any]:
        plain = {**asdict(self), "args": list(self.args), "workers_after": list(self.workers_after)}
        plain["source"] = self.source.to_json() if self.source else None
        return {**plain, "failures": [failure.to_json() for failure in self.failures]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RunConfig":
        names = {field.name for field in fields(cls)}
        if unknown := set(data) - names:
            raise BadInput(f"another version of holdfast wrote it, with {', '.join(sorted(unknown))}")
        lists: dict[str, Any] = {name: tuple(data[name]) for name in ("args", "workers_after") if name in data}
        if not all(isinstance(text, str) for text in (data.get("script"), *lists.get("args", ()))):
            raise BadInput("its script and arguments are not all text")
        failures = tuple(Failure.from_json(failure) for failure in data.get("failures", ()))
        if data.get("source") is not None:
            lists["source"] = WeightsSource.from_json(data["source"])
        return cls(**{**data, **lists, "failures": failures})


def read_config(out: Path) -> RunConfig:
    """Return the settings of the run in the folder `out`; raise BadInput if there are none, or they cannot be read."""
    try:
        return RunConfig.from_json(json.loads(read(DirectoryStore(out), RUN, _LONGEST)))
    except FileNotFoundError as error:
        raise BadInput(f"{out} holds no run: there is no run.json in it.") from error
    except (HoldfastError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{out / 'run.json'} cannot be read ({error}): name another folder.") from error


_adopted: RunConfig | None = None


def adopt(config: RunConfig) -> None:
    """Store the settings that this worker process got from its supervisor; `handed_over` returns them later."""
    global _adopted
    _adopted = config


def handed_over(out: Path) -> RunConfig:
    """Return the settings that the supervisor gave to this worker process, or the settings stored in `out`."""
    return _adopted or read_config(out)


def _check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadInput(f"there is no {setting} {value!r}: choose {', '.join(choices[:-1])} or {choices[-1]}.")
