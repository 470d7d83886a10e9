"""Ranks of a sharded run as threads that are connected in memory: any of them can be lost at any call on a connection.

Each thread trains with holdfast's own recovery and collectives. Only the connections, the supervisor's memberships and
the network are simulated. A membership with a replacement follows a loss when no surviving rank can do anything more, so
a run with the same `Loss` is always the same.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from holdfast.distributed.gloo_link import GroupBroken, Link
from holdfast.distributed.membership import Membership
from holdfast.distributed.ranks import BoundaryGate
from holdfast.errors import WorkerLost
from holdfast.live.recovery import LiveRecovery
from holdfast.live.sharded.operations import AllReduce, Team
from holdfast.live.sharded.shard_recovery import ShardedRecovery
from holdfast.live.training_hooks import TrainingHooks
from holdfast.train.state.protected import Protected

SIZE, STEPS, WIDTH, LAYERS = 4, 3, 4, 2
HANGS = 20.0  # seconds
_threads = ThreadPoolExecutor(3 * SIZE)  # they stay, because torch's caches for distributed tensors belong to threads


@dataclass(frozen=True)
class Loss:
    """The loss of `rank` at its link call number `call` since the membership number `membership` began.

    The rank has made the call if `has_sent`, so that the ranks in `completing` complete the operation. All other ranks
    that wait in it are interrupted."""

    rank: int
    call: int
    has_sent: bool = False
    completing: frozenset[int] = frozenset()
    membership: int = 0


class Killed(BaseException):
    """Raised in the thread of a rank that is lost."""


@dataclass
class Network:
    """The connections among the threads of one run, and the supervisor."""

    losses: list[Loss]
    spawn: Callable[["Network", int], Future[None]]
    membership: Membership = field(default_factory=Membership)
    fallback: str | None = None
    kinds: set[tuple[str, int]] = field(default_factory=set)  # of collectives, with the number of ranks that make them
    calls: dict[int, list[tuple[int, str]]] = field(default_factory=dict)  # by rank: step and operation
    changed: threading.Condition = field(default_factory=threading.Condition)
    posted: dict[Any, dict[int, Any]] = field(default_factory=dict)
    results: dict[Any, Any] = field(default_factory=dict)
    cut: dict[Any, frozenset[int]] = field(default_factory=dict)  # the ranks that complete an operation
    dead: set[int] = field(default_factory=set)
    finished: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)
    threads: list[Future[None]] = field(default_factory=list)
    _calls: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        with self.changed:
            self.threads += [self.spawn(self, rank) for rank in range(SIZE)]
            is_over = self.changed.wait_for(lambda: len(self.finished) == SIZE or self.fallback, HANGS)
            assert is_over, (
                f"ranks hang: {self.waiting.keys()} wait, {self.dead} are dead, {self.finished.keys()} are done"
            )
        for thread in self.threads:
            thread.result(HANGS)

    def wait(self, rank: int, is_ready: Callable[[], bool]) -> None:
        """Wait in the thread of `rank` until `is_ready`. Publish the next membership if no rank can do anything more."""
        self.waiting[rank] = is_ready
        self._publish_if_all_wait()
        assert self.changed.wait_for(lambda: is_ready() or self.fallback, HANGS), f"rank {rank} hangs"
        self.waiting.pop(rank, None)
        if self.fallback:
            raise Killed

    def _publish_if_all_wait(self) -> None:
        alive = set(range(SIZE)) - self.dead
        if not self.dead or {*self.waiting} < alive or any(is_ready() for is_ready in self.waiting.values()):
            return
        joining = {rank: SIZE + rank for rank in self.dead}
        self.membership = Membership(self.membership.number + 1, tuple(range(SIZE)), joining)
        self.threads += [self.spawn(self, rank) for rank in sorted(self.dead)]
        self.dead.clear()
        self.finished.clear()
        self._calls.clear()
        self.changed.notify_all()

    def end(self, rank: int) -> None:
        """Remove the killed `rank`."""
        self.dead.add(rank)
        self.waiting.pop(rank, None)
        self._publish_if_all_wait()
        self.changed.notify_all()

    def call(self, rank: int, step: int, operation: str, key: Any, post: Callable[[], None]) -> None:
        """Count a call of `rank` on a link; lose the rank before or after it has posted its part, if that is planned."""
        number = self._calls.get(rank, 0)
        self._calls[rank] = number + 1
        self.calls.setdefault(rank, []).append((step, operation))
        loss = next((loss for loss in self.losses
                     if (loss.rank, loss.call, loss.membership) == (rank, number, self.membership.number)), None)  # fmt: skip
        if loss and not loss.has_sent:
            raise Killed
        post()
        if loss:
            self.cut[key] = loss.completing
            raise Killed
        self.changed.notify_all()


class MemoryLink(Link):
    """A link to other threads. Like gloo, it computes the same result on every rank, from the values of all ranks."""

    def __init__(self, network: Network, rank: int, step: Callable[[], int]) -> None:
        super().__init__()
        self._network, self._rank, self._step = network, rank, step
        self._members: tuple[int, ...] = ()
        self._key: Any = None
        self._number: dict[Any, int] = {}

    def part(self) -> "MemoryLink":
        self._parts.append(MemoryLink(self._network, self._rank, self._step))
        return self._parts[-1]  # type: ignore[return-value]

    def hang_up(self) -> None:
        self.is_broken = True
        for part in self._parts:
            part.hang_up()

    def join(self, number: int, members: tuple[int, ...], name: str) -> None:
        self._key, self._members, self._number, self.is_broken = (number, name), members, {}, False
        self.do("allreduce", [torch.zeros(1)])

    def post(self, operation: str, *arguments: Any) -> Any:
        wait = getattr(self, f"_{operation.lstrip('_')}")(*arguments)
        has_time = self._rank % 2 == 0  # for one piece of other work while the operation waits
        return SimpleNamespace(wait=wait, is_completed=chain([not has_time], repeat(True)).__next__)

    def wait(self, work: Any) -> None:
        work.wait()  # any error but GroupBroken is a bug

    def _exchange(self, name: str, channel: Any, place: int, value: Any, count: int) -> Callable[[], dict[int, Any]]:
        """Post `value`, and return a function that waits until `count` ranks have posted theirs to the same channel."""
        network = self._network
        with network.changed:
            self._check()
            number = self._number[channel] = self._number.get(channel, 0) + 1
            key = (self._key, channel, number)
            network.call(self._rank, self._step(), name, key,
                         lambda: network.posted.setdefault(key, {}).update({place: value}))  # fmt: skip

        def wait() -> dict[int, Any]:
            with network.changed:
                network.wait(self._rank, lambda: self._is_ready(key, count) or self._is_outdated)
                if not self._is_ready(key, count):
                    self._check()
                return network.posted[key]

        return wait

    def _is_ready(self, key: Any, count: int) -> bool:
        is_cut = key in self._network.cut and self._rank not in self._network.cut[key]
        return len(self._network.posted.get(key, {})) == count and not is_cut

    @property
    def _is_outdated(self) -> bool:
        return self._network.membership.number > self._key[0]

    def _check(self) -> None:
        if self.is_broken or self._is_outdated:
            self.hang_up()
            raise GroupBroken("a rank is lost")

    @property
    def _place(self) -> int:
        return self._members.index(self._rank)

    def _allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Callable[[], None]:
        (values,) = tensors
        wait = self._exchange("allreduce", "all", self._place, values.clone(), len(self._members))
        is_mean = options is not None and options.reduceOp == ReduceOp.AVG

        def finish() -> None:
            posted = wait()
            total = torch.stack([posted[place] for place in range(len(self._members))]).sum(0)
            values.copy_(total / len(self._members) if is_mean else total)

        return finish

    def _allgather_base(self, output: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
        wait = self._exchange("allgather", "all", self._place, values.clone(), len(self._members))

        def finish() -> None:
            output.copy_(torch.cat([value for _, value in sorted(wait().items())]))

        return finish

    def _gather(self, outputs: Any, inputs: Sequence[torch.Tensor], options: Any) -> Callable[[], None]:
        wait = self._exchange("gather", "all", self._place, inputs[0].clone(), len(self._members))

        def finish() -> None:
            if options.rootRank == self._place:
                for place, value in wait().items():
                    outputs[0][place].copy_(value)

        return finish

    def _broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Callable[[], None]:
        wait = self._exchange("broadcast", "all", self._place, tensors[0].clone(), len(self._members))

        def finish() -> None:
            tensors[0].copy_(wait()[options.rootRank])

        return finish

    def _send(self, tensors: Sequence[torch.Tensor], to: int, _: int) -> Callable[[], None]:
        self._exchange("send", (self._place, to, "send"), 0, tensors[0].clone(), 1)
        channel = (self._place, to, "send")
        key = (self._key, ("sent", self._place, to), self._number[channel])
        with self._network.changed:
            self._network.posted[key] = {0: tensors[0].clone()}
            self._network.changed.notify_all()
        return lambda: None

    def _recv(self, tensors: Sequence[torch.Tensor], giver: int, _: int) -> Callable[[], None]:
        network, channel = self._network, (giver, self._place, "recv")
        with network.changed:
            self._check()
            number = self._number[channel] = self._number.get(channel, 0) + 1
            key = (self._key, ("sent", giver, self._place), number)
            network.call(self._rank, self._step(), "recv", key, lambda: None)

        def finish() -> None:
            with network.changed:
                network.wait(self._rank, lambda: key in network.posted or self._is_outdated)
                if key not in network.posted:
                    self._check()
                tensors[0].copy_(network.posted[key][0])

        return finish


class Coordinator:
    """The membership as one rank sees it; it stands for `Coordination`."""

    def __init__(self, network: Network, rank: int, *, is_joining: bool) -> None:
        self._network, self.member, self.rank, self.is_joining = network, rank, rank, is_joining
        self.members = () if is_joining else tuple(range(SIZE))
        self.gate, self.number = BoundaryGate(), network.membership.number - is_joining

    @property
    def is_outdated(self) -> bool:
        return self._network.membership.number > self.number

    def await_rank(self) -> int:
        return self.rank

    def await_admission(self) -> None:
        with self._network.changed:
            self._network.wait(self.rank, lambda: self.is_outdated)
        self.members = self._network.membership.members

    def leave(self) -> None:
        self.members = ()

    def next(self) -> Membership:
        with self._network.changed:
            self._network.wait(self.rank, lambda: self.is_outdated)
            self.number = self._network.membership.number
            return self._network.membership

    def exchange(
        self, members: tuple[int, ...], report: Mapping[str, Any], decode: Callable[[Any], Any]
    ) -> dict[int, Any]:
        network, key = self._network, ("reports", self.number)
        with network.changed:
            network.posted.setdefault(key, {})[self.rank] = report
            network.changed.notify_all()
            network.wait(self.rank, lambda: len(network.posted[key]) == len(members) or self.is_outdated)
            if self.is_outdated:
                raise GroupBroken("another rank is lost")
            return {member: decode(posted) for member, posted in network.posted[key].items()}

    def connect(self, link: MemoryLink, members: tuple[int, ...], name: str = "all") -> None:
        link.join(self.number, members, name)


class Record(list[Any]):
    def flush(self) -> None: ...

    def enrol(self, member: int) -> None: ...


class SimulatedRank:
    """One rank that trains a network of linear layers, sharded by rows, with momentum and, in every other step, a clipped gradient."""

    def __init__(self, network: Network, rank: int, mesh: Any, *, is_joining: bool) -> None:
        self.network, self.rank, self.mesh, self.step = network, rank, mesh, -1
        coordination: Any = Coordinator(network, rank, is_joining=is_joining)
        link = MemoryLink(network, rank, lambda: self.step)
        if not is_joining:
            coordination.connect(link, coordination.members)
        self.live = ShardedRecovery.take_over(LiveRecovery("replay", SIZE, coordination, link))
        self._make_teams()
        placements = [Replicate(), Shard(0)] if mesh.ndim > 1 else [Shard(0)]
        self.rows = WIDTH // self.team.ring.size
        self.model = nn.Module()
        for layer in range(LAYERS):
            generator = torch.Generator().manual_seed(layer)
            whole = torch.randn(WIDTH, WIDTH, generator=generator)
            own = whole.split(self.rows)[self.team.ring.rank].clone()
            value = DTensor.from_local(own, mesh, placements, run_check=False)
            self.model.register_parameter(f"layer{layer}", nn.Parameter(value))
        self.parameters: list[Any] = [*self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9, foreach=False)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        things: Any = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        ignore: Any = lambda *_: None  # noqa: E731
        self.live.start(
            TrainingHooks(
                losses=ignore,
                protected=Protected(things),
                record=Record(),  # type: ignore[arg-type]
                attempt=1,
                record_steps=ignore,
                inject=ignore,
                work=SimpleNamespace(is_pending=False, has_stepped=False),
                restore_shard=ignore,
            )
        )

    def _make_teams(self) -> None:
        ranks = self.mesh.mesh.tolist()
        rows = ranks if self.mesh.ndim > 1 else [ranks]
        make = lambda members: self.live.collectives.team(tuple(members), self.live.connect_new)  # noqa: E731
        self.replicas: Team | None = None
        if self.mesh.ndim > 1:
            self.replicas = make(next(column for column in zip(*rows, strict=True) if self.rank in column))
        self.team = make(next(row for row in rows if self.rank in row))

    def run(self) -> None:
        step = self.live.join() if self.live.is_joining else 0
        while step < STEPS:
            self.step = step
            self._cross(step)
            self.live.begin_step(step)
            self._train(step)
            self.live.end_step(1)
            self.network.kinds |= {(type(made).__name__, team.ring.size) for team, made in self.live.collectives.log}
            step += 1
        self.step = STEPS
        self._cross(STEPS)
        with self.network.changed:
            while not self.network.fallback:
                self.network.finished[self.rank] = self.state()
                self.network.changed.notify_all()
                self.network.wait(self.rank, lambda: self._is_over or self.live.coordination.is_outdated)
                if self._is_over:
                    return
                self.network.changed.release()
                try:
                    self.live.at_boundary(STEPS, last=True)
                finally:
                    self.network.changed.acquire()

    @property
    def _is_over(self) -> bool:
        return len(self.network.finished) == SIZE and not self.live.coordination.is_outdated

    def _cross(self, step: int) -> None:
        self.live.reach_boundary(step)
        self.live.at_boundary(step)

    def _train(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        x = torch.randn(WIDTH, generator=generator)
        inputs = []
        for layer in range(LAYERS):  # forward
            inputs.append(x)
            x = torch.tanh(self._gathered(layer) @ x)
        slope = x
        for layer in reversed(range(LAYERS)):  # backward
            weight = self._gathered(layer)
            gradient = torch.outer(slope, inputs[layer])
            slope = weight.T @ slope
            output = torch.empty(self.rows * WIDTH)
            self.live.reduce_scatter(output, gradient.flatten(), op=ReduceOp.AVG, group=SimpleNamespace(team=self.team))
            if self.replicas:
                self.live.collectives.run(AllReduce([output], ReduceOp.AVG), self.replicas)
            like = self.parameters[layer]
            grad = DTensor.from_local(output.view(self.rows, WIDTH), like.device_mesh, like.placements, run_check=False)
            like.grad = grad
        norm = sum(parameter.grad.to_local().square().sum() for parameter in self.parameters).reshape(1)
        self.live.collectives.run(AllReduce([norm], None), self.team)
        for parameter in self.parameters:
            if self.step % 2:
                parameter.grad.to_local().mul_(1.0 / (1.0 + norm))
            if self.team.ring.rank == self.team.ring.size - 1:  # so that the next rank cannot derive these gradients
                parameter.grad.to_local().add_(parameter.to_local().detach(), alpha=0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def _gathered(self, layer: int) -> torch.Tensor:
        whole = torch.empty(WIDTH * WIDTH)
        self.live.collectives.gather(whole, self.parameters[layer].to_local().detach(), key=layer, team=self.team)
        return whole.view(WIDTH, WIDTH)

    def state(self) -> list[Any]:
        """Return the bits of this rank's parameters and moments, and the learning rate."""
        moments = [self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.parameters]
        bits = [
            value.to_local().detach().view(torch.int32).flatten().tolist() for value in (*self.parameters, *moments)
        ]
        return [*bits, self.optimizer.param_groups[0]["lr"]]


def simulate(mesh: Any, losses: Sequence[Loss] = ()) -> Network:
    """Run four ranks with these losses to the end, and return their network, with their last states."""

    def spawn(network: Network, rank: int) -> Future[None]:
        return _threads.submit(live_and_die, network, rank, network.membership.number > 0)

    def live_and_die(network: Network, rank: int, is_joining: bool) -> None:
        try:
            SimulatedRank(network, rank, mesh, is_joining=is_joining).run()
        except Killed:
            with network.changed:
                network.end(rank)
        except WorkerLost as error:
            with network.changed:
                network.fallback = str(error)
                network.changed.notify_all()
        except BaseException as error:
            with network.changed:
                network.fallback = f"BUG: {error!r}"
                network.changed.notify_all()
            raise

    network = Network([*losses], spawn)
    network.run()
    return network


def mesh_of(replicas: int) -> Any:
    """Return a device mesh for four ranks; torch.distributed has only this process."""
    if replicas == 1:
        return init_device_mesh("cpu", (SIZE,))
    return init_device_mesh("cpu", (replicas, SIZE // replicas))
