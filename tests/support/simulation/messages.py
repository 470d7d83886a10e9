"""A simulated workers' store: the messages of one attempt, kept by one node. Other nodes may be cut off from it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from holdfast.distributed.ranks import Ranks
from simulation.faults import Faults
from simulation.scheduler import World

PATIENCE = 30.0  # seconds after which a node that is cut off gives up
T = TypeVar("T")


class Messages:
    """The methods of torch's `Store` that the product calls. `reaches(node, keeper)` says which way the network works."""

    def __init__(self, world: World, faults: Faults, keeper: int, reaches: Callable[[int, int], bool]) -> None:
        self._world, self._faults, self._keeper, self._reaches = world, faults, keeper, reaches
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._request("post", key, lambda: self._write(key, value))

    def get(self, key: str) -> bytes:
        return self._request("get", key, lambda: self._values[key])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._request("get", keys[0], lambda: [self._values[key] for key in keys])

    def check(self, keys: Sequence[str]) -> bool:
        return self._request("look for", ", ".join(keys[:1]), lambda: all(key in self._values for key in keys))

    def add(self, key: str, amount: int) -> int:
        def add() -> int:
            total = int(self._values.get(key, b"0")) + amount
            if amount:
                self._write(key, str(total))
            return total

        return self._request("add", key, add)

    def delete_key(self, key: str) -> bool:
        return self._request("delete", key, lambda: self._values.pop(key, None) is not None)

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        while not self.check(keys):
            self._world.poll(0.005)

    def _write(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value
        self._world.changes += 1

    def _request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        world, node = self._world, self._world.process.node
        world.sleep(world.latency() / 10)
        deadline = world.now + PATIENCE
        while not self._reaches(node, self._keeper):
            if world.now > deadline:
                raise RuntimeError(f"no answer to {verb} {key}")
            world.poll(0.1)
        if verb != "look for":
            self._faults.point(f"{verb} {key.partition('/')[0]}")
            world.record(f"{verb} {key}")
        result = effect()
        if verb != "look for":
            self._faults.after(f"{verb} {key.partition('/')[0]}")
        while not self._reaches(self._keeper, node):  # the answer is lost: a partition may work in one direction only
            if world.now > deadline:
                raise RuntimeError(f"no answer to {verb} {key}")
            world.poll(0.1)
        return result


class Prefixed:
    """torch's `PrefixStore`, over simulated messages."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(f"{self._prefix}/{key}"))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._store.multi_get([f"{self._prefix}/{key}" for key in keys]))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}" for key in keys]))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(f"{self._prefix}/{key}"))

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        self._store.wait([f"{self._prefix}/{key}" for key in keys], limit)


class SimulatedRanks(Ranks):
    """The product's `Ranks`, without the thread that tells the others that rank 0 is busy: the clock does not need it."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        yield
