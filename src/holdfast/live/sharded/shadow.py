"""The shadow of a rank's shards: a copy on the next rank that makes the same optimizer steps.

The next rank gets the final gradients of this rank just before the optimizer steps, after clipping and scaling (see
exchange.py). With these gradients, it makes the same step on its copy of the parameters and moments. The optimizers of
torch compute every element independently, so the copy has the same bits after every step, also if a step is made for a
few parameters at a time. On a CPU, that is done while the next collectives wait for other ranks.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from holdfast.distributed.gloo_link import Link
from holdfast.errors import BadInput
from holdfast.live import state_transfer
from holdfast.live.sharded.exchange import Exchange, GradientExchange
from holdfast.live.sharded.operations import Reduce, Ring
from holdfast.live.sharded.spare_work import SpareWork
from holdfast.train.state.plain_values import PlainState
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import is_dtensor, like, local

ELEMENTWISE = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop)
_SCALER_INPUTS = ("grad_scale", "found_inf")  # a gradient scaler sets these on fused optimizers
SAMPLED_TENSORS, SAMPLED = 16, 8  # parameters, and values of each, by which a copy is checked in every step
PARAMETERS, MOMENTS = "parameters", "moments"
PIECE = 1 << 19  # bytes of parameters for which a step is made at once, if it can wait


def check_own_objects(protected: Protected, recovery: str) -> None:
    """Raise BadInput if an object of the user's own class has distributed tensors, which no other rank has."""
    for name, thing in protected.own_objects.items():
        if _has_dtensors(thing.state_dict()):
            raise BadInput(
                f"{name} is a {type(thing).__name__} with distributed tensors, and with --recovery {recovery} only those of "
                "models and optimizers come back after a loss: put them into a module, such as AveragedModel, or choose "
                "--recovery restart."
            )


def check_copyable(protected: Protected) -> None:
    """Raise BadInput if a neighbour could not keep a copy of a rank's shards.

    The copy needs optimizers that compute every element of a parameter independently. Distributed tensors may be only in
    models and optimizers."""
    check_own_objects(protected, "replay")
    for name, thing in protected.things.items():
        if isinstance(thing, Optimizer) and type(thing) not in ELEMENTWISE:
            raise BadInput(
                f"{name} is a {type(thing).__name__}: with --recovery replay, a neighbour repeats each rank's optimizer "
                "steps on a copy of its shard, which needs an optimizer of torch.optim that computes each element on "
                "its own, such as AdamW or SGD. Choose one, or --recovery restart."
            )


class OwnShards:
    """The shards of the protected models and optimizers that this rank trains.

    Make this object between two steps: within a step, FSDP replaces sharded parameters by gathered parameters."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self.parameters: dict[str, Any] = {}
        known: set[int] = set()
        for name, thing in protected.things.items():
            if isinstance(thing, nn.Module):
                for key, parameter in thing.named_parameters():
                    if is_dtensor(parameter) and id(parameter) not in known:
                        known.add(id(parameter))
                        self.parameters[f"{name}/{key}"] = parameter
        self.optimizers: dict[str, Optimizer] = {
            name: thing for name, thing in protected.things.items() if isinstance(thing, Optimizer)
        }
        trained = {id(parameter) for optimizer in self.optimizers.values() for parameter in trained_by(optimizer)}
        untrained = {name: value for name, value in self.parameters.items() if id(value) not in trained}
        self.untrained = untrained
        trained_models = {name.partition("/")[0] for name in self.parameters.keys() - untrained.keys()}
        # Models that no optimizer trains, such as averages of weights: they may change after any step.
        self.averages = {
            name: value for name, value in untrained.items() if name.partition("/")[0] not in trained_models
        }
        self._frozen = [value for name, value in untrained.items() if name not in self.averages]
        self.sampled_names = list(self.parameters)[:: max(1, len(self.parameters) // SAMPLED_TENSORS)]
        self._frozen_values = self._sample_frozen()

    @property
    def has_replicas(self) -> bool:
        """True if other ranks hold the same shards, as with hybrid sharding."""
        return any(parameter.device_mesh.ndim > 1 for parameter in self.parameters.values())

    @property
    def sampled(self) -> list[torch.Tensor]:
        """The shards of a few parameters, by which copies are checked."""
        return [local(self.parameters[name]) for name in self.sampled_names]

    def has_frozen_changed(self) -> bool:
        """Return True if a frozen parameter of a trained model has changed, so that its copy is outdated."""
        return self._sample_frozen() != self._frozen_values

    def _sample_frozen(self) -> list[list[float]]:
        # Not by version counters: operations on several distributed tensors at once do not change them.
        return [local(value).detach().flatten()[:8].tolist() for value in self._frozen]

    def capture(self) -> dict[str, Any]:
        """Return the values of all shards and of their optimizer states, without copying them."""
        return {
            PARAMETERS: {name: local(value).detach() for name, value in self.parameters.items()},
            MOMENTS: {name: _moments(trained_by(optimizer), optimizer) for name, optimizer in self.optimizers.items()},
        }

    def compared(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of the captured `state`, of this rank or of a copy, that have the same bits in both.

        Frozen parameters are left out, because the script may change them."""
        names = {id(value): name for name, value in self.parameters.items()}
        frozen = {names[id(value)] for value in self._frozen}
        tensors = {name: value for name, value in state[PARAMETERS].items() if name not in frozen}
        for optimizer, moments in state[MOMENTS].items():
            trained = [names.get(id(parameter), "") for parameter in trained_by(self.optimizers[optimizer])]
            tensors |= {
                f"{key} of {trained[number]}": moments[number][key]
                for number in sorted(moments)
                for key in sorted(moments[number])
            }
        return tensors

    def capture_rest(self) -> dict[str, Any]:
        """Return the remaining protected state, which a replacement gets from any rank, such as that of schedulers."""
        return {
            name: _without_dtensors(thing.state_dict())
            for name, thing in self._protected.things.items()
            if not isinstance(thing, nn.Module | PlainState)
        }

    @torch.no_grad()
    def load(self, shards: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Load what `capture` and `capture_rest` returned on other ranks."""
        for name, values in shards[PARAMETERS].items():
            local(self.parameters[name]).copy_(values)
        states = dict(rest)
        for name, moments in shards[MOMENTS].items():
            parameters = trained_by(self.optimizers[name])
            for number, values in moments.items():
                state = states[name]["state"].setdefault(number, {})
                state.update({key: like(parameters[number], value) for key, value in values.items()})
        self._protected.restore_some(states)
        self._frozen_values = self._sample_frozen()


class Shadow:
    """A copy of the previous rank's shards, with optimizers that repeat the previous rank's steps.

    Steps that can wait are added to `spare`."""

    def __init__(self, own: OwnShards, state: Mapping[str, Any], spare: SpareWork) -> None:
        self._own, self._spare = own, spare
        self.is_exact = True
        """False once a sample of the copied parameters differs from a sample that their owner has sent."""
        device = next((local(value).device for value in own.parameters.values()), torch.device("cpu"))
        self._can_wait = device.type == "cpu"  # on a GPU, a step only begins here, and in the stream of the script's
        self._parameters = {
            name: nn.Parameter(values.to(device, copy=True), requires_grad=own.parameters[name].requires_grad)
            for name, values in state[PARAMETERS].items()
        }
        names = {id(parameter): name for name, parameter in own.parameters.items()}
        self._optimizers = {
            name: self._mirror(optimizer, names, state[MOMENTS][name], device)
            for name, optimizer in own.optimizers.items()
        }

    def _mirror(
        self, optimizer: Optimizer, names: Mapping[int, str], moments: Mapping[int, Any], device: torch.device
    ) -> Optimizer:
        mirror = copy.copy(optimizer)
        mirror.state = defaultdict(dict)
        mirror.param_groups = [
            {**group, "params": [self._parameters[names[id(parameter)]] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        for number, (parameter, mirrored) in enumerate(zip(trained_by(optimizer), trained_by(mirror), strict=True)):
            scalars = {key: copy.deepcopy(value) for key, value in optimizer.state.get(parameter, {}).items()
                       if not _is_moment(value)}  # fmt: skip
            sharded = {key: value.to(device, copy=True) for key, value in moments.get(number, {}).items()}
            if scalars or sharded:
                mirror.state[mirrored].update({**scalars, **sharded})
        return mirror

    def capture(self) -> dict[str, Any]:
        """Return the values of the copied shards and of their optimizer states, without copying them."""
        self._spare.finish()
        return {
            PARAMETERS: {name: value.detach() for name, value in self._parameters.items()},
            MOMENTS: {name: _moments(trained_by(mirror), mirror) for name, mirror in self._optimizers.items()},
        }

    @property
    def nbytes(self) -> int:
        """The size of the copy in bytes: its parameters, and the moments that its optimizers have so far."""
        self._spare.finish()
        tensors = [*self._parameters.values()]
        for mirror in self._optimizers.values():
            tensors += [value for state in mirror.state.values() for value in state.values() if _is_moment(value)]
        return sum(tensor.nbytes for tensor in tensors)

    def exchange_gradients(self, name: str, reductions: Sequence[Reduce]) -> GradientExchange:
        """Return the exchange of gradients that precedes a step of the optimizer `name`.

        `reductions` are those of this step. With a digest of a few parameters, the next rank checks its copy."""
        self._spare.finish()
        pairs = zip(trained_by(self._own.optimizers[name]), trained_by(self._optimizers[name]), strict=True)
        present = [(local(parameter.grad), copied) for parameter, copied in pairs if parameter.grad is not None]
        own, copies = [own for own, _ in present], [copied for _, copied in present]
        copied_digest = sample([self._parameters[name] for name in self._own.sampled_names])

        def check(digest: int) -> None:
            self.is_exact &= digest == copied_digest

        return GradientExchange(own, copies, reductions, sample(self._own.sampled), check)

    def exchange_averages(self) -> Exchange:
        """Return the exchange of the sharded models that no protected optimizer trains, such as averages of weights."""
        names = list(self._own.averages)
        own = [local(self._own.averages[name]) for name in names]
        return Exchange(own, [self._parameters[name] for name in names], _set_values)

    def step(self, name: str) -> None:
        """Repeat the step of the optimizer `name` on the copy, now or later, with the gradients that were received before.

        The settings of the optimizer are those of now, such as the learning rate: a scheduler may change them."""
        optimizer, mirror = self._own.optimizers[name], self._optimizers[name]
        for group, copied in zip(optimizer.param_groups, mirror.param_groups, strict=True):
            copied.update({key: copy.deepcopy(value) for key, value in group.items() if key != "params"})
        for attribute in _SCALER_INPUTS:
            if hasattr(optimizer, attribute):
                setattr(mirror, attribute, copy.deepcopy(getattr(optimizer, attribute)))
        self._spare.add(_pieces(mirror, PIECE if self._can_wait else math.inf))
        if not self._can_wait:
            self._spare.finish()


def _pieces(mirror: Optimizer, size: float) -> Iterator[Callable[[], None]]:
    """Yield functions that together make a step of `mirror`, each for parameters of about `size` bytes."""
    for group in mirror.param_groups:
        some: list[torch.Tensor] = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                some.append(parameter)
            if sum(parameter.nbytes for parameter in some) >= size:
                yield partial(_step_some, mirror, {**group, "params": some})
                some = []
        if some:
            yield partial(_step_some, mirror, {**group, "params": some})


@torch.inference_mode(False)
def _step_some(mirror: Optimizer, group: dict[str, Any]) -> None:
    """Make a step of `mirror` for the parameters of `group`, without the hooks, which count the steps of the script."""
    every, mirror.param_groups = mirror.param_groups, [group]
    type(mirror).step.__wrapped__(mirror)  # type: ignore[attr-defined]
    mirror.param_groups = every
    for parameter in group["params"]:
        parameter.grad = None


def _set_values(copied: torch.Tensor, values: torch.Tensor) -> None:
    copied.detach().copy_(values)


def sample(tensors: Iterable[torch.Tensor]) -> int:
    """Return a digest of a few values of each tensor."""
    few: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for values in tensors:
        apart = max(1, values.numel() // SAMPLED)
        few[values.dtype].append(
            values.detach().contiguous().as_strided((math.ceil(values.numel() / apart),), (apart,))
        )
    hasher = xxhash.xxh3_64()
    for some in few.values():
        hasher.update(torch.cat(some).cpu().view(torch.uint8).numpy().data)
    return int(hasher.intdigest() >> 1)  # fits into a signed number


def trained_by(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of an optimizer, in the order in which its state_dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _moments(parameters: Sequence[Any], optimizer: Optimizer) -> dict[int, dict[str, torch.Tensor]]:
    return {
        number: {key: local(value).detach() for key, value in optimizer.state[parameter].items() if _is_moment(value)}
        for number, parameter in enumerate(parameters)
        if parameter in optimizer.state
    }


def _is_moment(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _has_dtensors(state: Any) -> bool:
    values = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return is_dtensor(state) or any(map(_has_dtensors, values))


def _without_dtensors(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _without_dtensors(value) for key, value in state.items() if not is_dtensor(value)}
    return state


def exchange_copies(own: OwnShards, link: Link, ring: Ring, spare: SpareWork) -> Shadow:
    """Send this rank's shards to the next rank, and return the copy of the previous rank's shards."""
    copied = None
    for pairs in neighbours(ring):
        for giver, taker in pairs:
            if ring.rank in (giver, taker):
                copied = state_transfer.transfer(link, ring.rank, giver, (taker,), own.capture) or copied
    assert copied is not None  # a ring has at least two ranks
    return Shadow(own, copied, spare)


def neighbours(ring: Ring) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of (giver, taker) pairs. In all rounds together, every rank gives to the next rank once.

    In a single round, no rank is both giver and taker."""
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    rings = math.gcd(ring.size, ring.apart)
    length = ring.size // rings
    for first in range(rings):
        for place in range(length):
            giver = (first + place * ring.apart) % ring.size
            is_odd_one = length % 2 and place == length - 1
            rounds[2 if is_odd_one else place % 2].append((giver, ring.at(giver).next))
    yield from rounds
