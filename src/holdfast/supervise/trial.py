"""Imports tried in a process of their own, before this one takes them over to the workers that it forks.

What a module does when it is imported may not survive a fork, or may be meant for one worker: threads, a CUDA context, a
look at the rank. Whatever does one of these is found out here, and left to the workers. A trial takes as long as the
imports do, so what came of it is remembered in the cache folder until something is installed or removed.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from holdfast.events import JSON
from holdfast.supervise.child_call import Aside
from holdfast.supervise.imports import INSTALLED
from holdfast.supervise.preload import cuda_started
from holdfast.workloads.fetch import cache_folder

WITHIN = 120.0
LONGEST = 1 << 16  # bytes of what is remembered
# Variables that every worker has for itself: as torchrun sets them, and what holdfast adds.
OF_WORKERS = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "LOCAL_",
    "TORCHELASTIC_",
    "HOLDFAST_",
    "OMP_NUM_THREADS",
)


class Tried(NamedTuple):
    """The seconds that each of the first imports took, and why the one after them is not to be taken over, if so."""

    seconds: Sequence[float]
    why: str | None


def tried(statements: Sequence[str]) -> Tried:
    """Import one after the other, up to the first that cannot be taken over."""
    place = _place(statements)
    told: Any = _remembered(place, statements)
    if told is None:
        told = Aside(lambda: _try(statements), "an import").result(WITHIN)
        with suppress(OSError):  # a cache that cannot be used is passed over
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(told))
    return Tried(*told)


def _place(statements: Sequence[str]) -> Path:
    """Where the trial of these imports is remembered, as long as the same packages are installed."""
    folders = [Path(each) for each in sys.path if INSTALLED & set(Path(each).parts) and Path(each).is_dir()]
    known = [sys.version, *statements, *(f"{each} {each.stat().st_mtime_ns}" for each in folders)]
    return cache_folder() / "imports" / f"{xxhash.xxh3_128_hexdigest(json.dumps(known).encode())}.json"


def _remembered(place: Path, statements: Sequence[str]) -> JSON:
    with suppress(OSError, ValueError, TypeError):
        seconds, why = json.loads(place.read_bytes()[:LONGEST])
        whole = len(seconds) == len(statements) if why is None else 0 < len(seconds) <= len(statements)
        if whole and all(type(each) is float for each in seconds) and (why is None or type(why) is str):
            return [seconds, why]
    return None


def _try(statements: Sequence[str]) -> JSON:
    sys.stdout = sys.stderr = nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - to the end of this process
    for number in (1, 2):
        os.dup2(nowhere.fileno(), number)
    seconds: list[float] = []
    read = _watched(os.environ)
    for statement in statements:
        began = time.perf_counter()
        why = _import(statement)
        took = time.perf_counter() - began
        if why := why or _unfit(read()):
            return [*seconds, took], why
        seconds.append(took)
    return seconds, None


def imported(statement: str) -> None:
    """Do as the statement says; its warnings are not this command's, and a worker would have shown them as its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(statement, {})


def _import(statement: str) -> str | None:
    try:
        imported(statement)
    except BaseException as error:  # whatever it is, the worker meets it too, and says so
        return f"it raises {type(error).__name__}"
    return None


def _unfit(read: set[str]) -> str | None:
    if own := sorted(name for name in read if name.startswith(OF_WORKERS)):
        return f"it reads {own[0]}, which every worker has for itself"
    if cuda_started():
        return "it starts CUDA"
    return "it starts threads" if _threads_left() else None


def _threads_left() -> bool:
    """Whether there are threads that do not end for a fork, as those of thoughtful libraries do."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(list(Path("/proc/self/task").iterdir())) > 1 if Path("/proc/self/task").exists() else False


def _watched(environ: MutableMapping[str, str]) -> Callable[[], set[str]]:
    """Have it remember which variables are asked for by name; the function returned says which."""
    names: set[str] = set()
    kind = type(environ)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            names.add(name)
            return str(super().__getitem__(name))

    environ.__class__ = Watched
    return lambda: set(names)
