"""A simulated object storage, below the product's `ObjectStore`: every request takes time and may fail.

A request takes effect at one moment between its beginning and its answer. A client that is killed or paused in between
does not know whether it took effect.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.checkpoint.objects import ObjectStore
from simulation.faults import Faults
from simulation.scheduler import World

ROOT = "run"
_PHASES = (
    (r"nodes/term-.*", "term"),
    (r"nodes/attempt-.*", "attempt"),
    (r"step-\d+(?:-term-\d+)?/shard.*", "shard"),
    (r"step-\d+(?:-term-\d+)?/extra.json", "extra"),
    (r"step-\d+(?:-term-\d+)?/manifest.json", "manifest"),
    (r"latest.json", "latest"),
    (r"step-\d+.*", "snapshot"),
    (r"set-aside.*", "set aside"),
)
T = TypeVar("T")


class Bucket:
    """The objects of one bucket, by name. `watch(verb, name)` is called after each change, at the moment of the change."""

    def __init__(self, watch: Callable[[str, str], None] = lambda verb, name: None) -> None:
        self.values: dict[str, bytes] = {}
        self.watch = watch

    def put(self, name: str, value: bytes) -> None:
        self.values[name] = value
        self.watch("put", name)

    def create(self, name: str, value: bytes) -> None:
        if name in self.values:
            raise FileExistsError(name)
        self.values[name] = value
        self.watch("create", name)

    def remove(self, name: str) -> None:
        del self.values[name]
        self.watch("remove", name)


class _File:
    """An object that is being written by `open`; it appears when the file is closed."""

    def __init__(self, finish: Callable[[bytes], None]) -> None:
        self._parts: list[bytes] = []
        self._finish, self.closed = finish, False

    def write(self, part: Any) -> None:
        self._parts.append(bytes(part))

    def close(self) -> None:
        self._finish(b"".join(self._parts))

    def discard(self) -> None: ...


class Requests:
    """The fsspec methods that `ObjectStore` calls, as requests of the process that calls them."""

    protocol = ("sim",)

    def __init__(self, world: World, faults: Faults, bucket: Bucket) -> None:
        self._world, self._faults, self._bucket = world, faults, bucket

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        change = self._bucket.create if mode == "create" else self._bucket.put
        self._request(mode, path, lambda: change(_name(path), bytes(value)))

    def open(self, path: str, mode: str, block_size: int) -> _File:
        return _File(lambda value: self.pipe_file(path, value))

    def info(self, path: str) -> dict[str, int]:
        return self._request("size", path, lambda: {"size": len(self._get(path))})

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        return self._request("read", path, lambda: self._get(path)[start:end])

    def find(self, path: str) -> list[str]:
        prefix = _name(path)
        return self._request(
            "list", path, lambda: [f"{ROOT}/{name}" for name in sorted(self._bucket.values) if name.startswith(prefix)]
        )

    def rm_file(self, path: str) -> None:
        self._request("remove", path, lambda: (self._get(path), self._bucket.remove(_name(path)))[1])

    def cp_file(self, path: str, to: str) -> None:
        self._request("copy", path, lambda: self._bucket.put(_name(to), self._get(path)))

    def _get(self, path: str) -> bytes:
        if (name := _name(path)) not in self._bucket.values:
            raise FileNotFoundError(path)
        return self._bucket.values[name]

    def _request(self, verb: str, path: str, effect: Callable[[], T]) -> T:
        phase = f"{verb} {phase_of(_name(path))}"
        self._world.sleep(self._delay(phase))
        self._faults.point(phase)
        if self._faults.strike("storage error", phase):
            raise OSError(5, "the storage is away")
        self._world.record(f"{verb} {_name(path)}")
        self._world.changes += verb not in ("read", "size", "list")
        result = effect()
        self._world.sleep(self._delay(phase))
        self._faults.point(phase)
        if verb in ("overwrite", "create", "remove") and self._faults.strike("lost answer", phase):
            raise OSError(110, "the answer was lost")
        return result

    def _delay(self, phase: str) -> float:
        if self._faults.strike("slow storage", phase):
            return self._world.rng.uniform(1, 40)
        return self._world.latency() * self._faults.slowness


class SimulatedStore(ObjectStore):
    """The product's `ObjectStore` over a simulated bucket."""

    def __init__(self, world: World, faults: Faults, bucket: Bucket) -> None:
        self.url, self._root, self._fs = "sim://run", ROOT, Requests(world, faults, bucket)


def phase_of(name: str) -> str:
    """Return the part of a save or restart that an object of this name belongs to."""
    return next((phase for pattern, phase in _PHASES if re.fullmatch(pattern, name)), "store")


def _name(path: str) -> str:
    return path.removeprefix(ROOT).lstrip("/")
