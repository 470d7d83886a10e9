"""Search for the state of a script that is not protected (saved and restored).

The search starts from the variables of the script's running functions and modules, and from objects of the caller.
"""

import functools
import inspect
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.libraries import is_of_library
from holdfast.train.observe import value_digests
from holdfast.train.observe.observations import UnprotectedValue
from holdfast.train.state.shards import address

DEEPEST, MOST, LONGEST = 8, 20_000, 256  # levels, values, and entries of one container that are searched
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, FunctionType, MethodType, GeneratorType, functools.partial)
_HOLDFAST = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A value that was found in the script's memory, and the path that leads to it from a variable, such as `a.b[0]`.

    `where` is the function that has this variable. `foreign` is True for a value inside an object of a library."""

    value: Any
    path: str
    where: str = ""  # the function whose variable it is
    depth: int = 0
    foreign: bool = False  # inside an object of a library
    in_module: bool = False
    inside: "Place | None" = None  # the nearest object around it that is not a container

    @property
    def name(self) -> str:
        """The path and the function in which it begins, for messages, such as `ema.module in main()`."""
        return f"{self.path} in {self.where}()" if self.where else self.path

    def parts(self) -> Iterator["Place"]:
        """Yield the values inside this value, such as attributes or items, without running code of the script."""
        foreign = self.foreign or _is_foreign(self.value)
        in_module = isinstance(self.value, nn.Module)
        inside = self.inside if isinstance(self.value, CONTAINERS) else self
        for key, value in _parts(self.value):
            path = self.path if key is None else f"{self.path}.{key}" if isinstance(key, str) else f"{self.path}[{key}]"
            yield Place(value, path, self.where, self.depth + 1, foreign, in_module, inside)


def held(
    frames: Iterable[FrameType], roots: Mapping[str, Any], protected: Mapping[str, Any]
) -> dict[str, UnprotectedValue]:
    """Return the values in the script's memory that the run does not save, by path.

    The search begins at the variables of `frames`, the named objects `roots` and the `protected` objects."""
    memory = saved_memory({name: thing.state_dict() for name, thing in protected.items()})
    things = {id(thing) for thing in protected.values()}
    found: dict[str, UnprotectedValue] = {}
    search = Search(starts(frames, {**protected, **roots}))
    for place in search:
        with suppress(Exception):  # a script may hold anything, such as a proxy of an object that does not exist yet
            if kind := _kind(place, memory, things):
                if kind != "value" or not place.foreign or place.in_module:
                    value = UnprotectedValue(kind=kind, type=type(place.value).__name__, mark=_mark(place.value, kind))
                    found.setdefault(place.name, value)
            else:
                search.expand(place)
    return found


def frames_of_script(frame: FrameType | None) -> list[FrameType]:
    """Return `frame` and its callers, innermost first, without the frames of libraries and of holdfast."""
    frames = []
    while frame:
        if not _is_of_library(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


def is_global(generator: object) -> bool:
    """Return True if the run seeds the generator before each step: a global one of torch, numpy or Python."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    seeded = (torch.default_generator, random._inst, np.random.mtrand._rand, *devices)
    return any(generator is global_generator for global_generator in seeded)


def saved_memory(state: object) -> set[int]:
    """Return the memory addresses of all tensors in the nested `state`."""
    tensors = (value for _, value in value_digests.leaves(state) if isinstance(value, torch.Tensor))
    return {place for place in map(address, tensors) if place is not None}


class Search:
    """A breadth-first search through the script's objects, which yields each object once.

    The caller decides with `expand` whether to search inside an object."""

    def __init__(self, starts: Iterable[Place]) -> None:
        self._waiting = deque(starts)
        self._ids: set[int] = set()
        self._kept: list[object] = []  # otherwise an id may be reused
        self._count = 0

    def __iter__(self) -> Iterator[Place]:
        while self._waiting and self._count < MOST:
            place = self._waiting.popleft()
            with suppress(Exception):
                if self._is_known(place.value):
                    continue
            yield place

    def expand(self, place: Place) -> None:
        """Also search the values inside `place`, unless `place` is nested too deeply."""
        if place.depth < DEEPEST:
            self._waiting.extend(place.parts())

    def _is_known(self, value: object) -> bool:
        """Return True if `value` was visited before, and remember it. Numbers and strings always count as new."""
        self._count += 1
        if isinstance(value, PLAIN):
            return False
        if id(value) in self._ids:
            return True
        self._ids.add(id(value))
        self._kept.append(value)
        return False


def starts(frames: Iterable[FrameType], roots: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the places where a search begins: the named objects `roots`, and the variables of `frames` and modules."""
    for name, value in roots.items():
        yield Place(value, name)
    spaces: dict[int, Mapping[str, Any]] = {}
    for frame in frames:
        if (function := frame.f_code.co_name) != "<module>":
            yield from (Place(value, name, function) for name, value in _local_variables(frame).items())
        spaces[id(frame.f_globals)] = frame.f_globals
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not _is_of_library(file) and isinstance(module, ModuleType):
            spaces.setdefault(id(vars(module)), vars(module))
    for space in spaces.values():
        yield from (Place(value, name) for name, value in list(space.items()) if not name.startswith("__"))


def _local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the frame's local variables, without leaving references that keep tensors alive in the frame."""
    variables = dict(frame.f_locals)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(frame.f_locals) is dict:  # not so since Python 3.13
        frame.f_locals.clear()
    return variables


def _kind(place: Place, memory: set[int], things: set[int]) -> str | None:
    """Return the kind of the value, such as "tensor"; None if the run saves it, or if it only contains other values.

    `memory` has the addresses of all saved tensors, and `things` the ids of the protected objects."""
    value = place.value
    if isinstance(value, GENERATORS):
        return None if is_global(value) else "generator"
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if isinstance(value, torch.Tensor) and address(value) in memory:
            return None
        if place.in_module:
            return "module" if _is_in_state_dict(place) else "buffer"
        return "tensor"
    if isinstance(value, torch.amp.GradScaler):
        return None if id(value) in things else "scaler"
    if isinstance(value, LRScheduler | Optimizer) and id(value) not in things:
        return "scheduler" if isinstance(value, LRScheduler) else "optimizer"
    return "value" if isinstance(value, PLAIN) else None


def _is_in_state_dict(place: Place) -> bool:
    """Return True if the tensor at `place`, inside a module, would be saved if the module were protected."""
    module, name = place.inside.value if place.inside else None, place.path.rpartition(".")[2]
    if not isinstance(module, nn.Module):
        return False
    return name in module._parameters or (name in module._buffers and name not in module._non_persistent_buffers_set)


def _mark(value: Any, kind: str) -> str:
    if kind == "generator":
        return value_digests.of_generator(value)
    if kind in ("scheduler", "optimizer", "scaler"):
        state = value_digests.marks(value.state_dict(), cheap=True)
        return f"at step {state['last_epoch']}" if "last_epoch" in state else value_digests.mark(state)
    return value_digests.mark(value, cheap=True)


def _parts(value: Any) -> Iterable[tuple[str | int | None, Any]]:
    """Return (name, child) for each value inside `value` to search. The name is None if it adds nothing to the path."""
    if isinstance(value, nn.Module):
        return [*_named(value._parameters), *_named(value._buffers), *_named(value._modules), *_own(value, _MODULE)]
    if isinstance(value, Mapping):
        return _named(value)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return enumerate(islice(value, LONGEST))
    if isinstance(value, MethodType):
        return [(None, value.__self__)]
    if isinstance(value, functools.partial):
        return [(None, value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, FunctionType):
        return [] if _is_of_library(value.__code__.co_filename) else _enclosed(value)
    if isinstance(value, GeneratorType):
        inside = value.gi_frame
        return list(inside.f_locals.items()) if inside and not _is_of_library(inside.f_code.co_filename) else []
    if isinstance(value, ModuleType | type | LRScheduler | Optimizer):
        return []
    if type(value).__module__.startswith(("holdfast", "torch.distributed.")):  # such as FSDP's buffers of a module
        return []
    return _own(value, frozenset())


def _named(values: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in islice(values.items(), LONGEST)]


def _own(value: Any, apart_from: Iterable[str]) -> list[tuple[str, Any]]:
    """Return the instance attributes of `value` except `apart_from`, without running properties or other user code."""
    attributes = dict(islice(getattr(value, "__dict__", {}).items(), LONGEST))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            if isinstance(descriptor, MemberDescriptorType):
                try:
                    attributes[name] = descriptor.__get__(value)
                except AttributeError:
                    continue  # it was never set
    return [(name, attribute) for name, attribute in attributes.items() if name not in apart_from]


def _enclosed(function: FunctionType) -> list[tuple[str, Any]]:
    variables = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables.append((name, cell.cell_contents))
        except ValueError:
            continue  # it is not set yet
    return variables


_MODULE = frozenset(vars(nn.Module())) - {"training"}


def _is_foreign(value: Any) -> bool:
    if isinstance(value, CONTAINERS) and not isinstance(value, functools.partial):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return not (isinstance(file, str) and not _is_of_library(file))


@functools.cache
def _is_of_library(file: str) -> bool:
    return file.startswith(("<", _HOLDFAST)) or is_of_library(file)
