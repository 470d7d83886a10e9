"""A simulated run that recovers live: supervisors decide who trains, and workers continue after losses.

The supervisors' `MembershipController` and the workers' `Coordination`, `LiveRecovery`, `RecoverableGroup` and transfer
of states are the product's. What is simulated: processes, connections, the workers' store, and one small model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.distributed import membership
from holdfast.distributed.gloo_link import GroupBroken
from holdfast.distributed.membership import Coordination, Membership, MembershipWatch, Suspended
from holdfast.errors import WorkerLost
from holdfast.live import backward_guard, handover, rank_values, recovery, state_transfer
from holdfast.live.recovery import LiveRecovery
from holdfast.live.settlement import LossEffects
from holdfast.live.training_hooks import TrainingHooks
from holdfast.progress import Phase, Progress
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import SamplePlan
from holdfast.sampler.run_plan import RunPlan
from holdfast.supervise.nodes import rendezvous
from holdfast.supervise.nodes.rendezvous import Peers, RoundInfo
from holdfast.supervise.workers.membership_control import MembershipController, Stranded
from holdfast.supervise.workers.process import WorkerProcess
from holdfast.train.state.protected import Protected
from simulation.faults import Faults
from simulation.links import Connections, SimulatedLink
from simulation.messages import Messages, Prefixed
from simulation.product import simulated
from simulation.schedule import Outcome, failures
from simulation.scheduler import Dead, Process, Violation, World
from simulation.worker import Model

ROUND = "round"
LOOK = 0.02
LIVE_LIMIT = 600.0  # seconds of the simulated clock


class SimulatedWatch:
    """The product's `MembershipWatch` as a task of the process that starts it."""

    world: World
    run = MembershipWatch.run

    def __init__(self, store: Any, changed: Any) -> None:
        self._store, self._changed, self.current = store, changed, Membership()
        self.world.spawn(self.world.process, self.run)


class SimulatedThread:
    """A thread that the product starts, as a task of the process that starts it."""

    world: World
    daemon = False

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        self.world.spawn(self.world.process, lambda: self._target(*self._args))


class SimulatedRecovery(LiveRecovery):
    """The product's `LiveRecovery`, without what it changes in torch for the whole process."""

    __slots__ = ()

    def _renew_default_group(self) -> None: ...


class SimulatedWorker:
    """A worker as its supervisor sees it."""

    membership, is_in_reserve = WorkerProcess.membership, WorkerProcess.is_in_reserve
    is_ready, is_starting = WorkerProcess.is_ready, WorkerProcess.is_starting
    has_failed, left_midway = WorkerProcess.has_failed, WorkerProcess.left_midway
    can_lose_peers, has_finished = WorkerProcess.can_lose_peers, WorkerProcess.has_finished
    hung = ""

    def __init__(self, process: Process, seat: int, local_rank: int, progress: Progress) -> None:
        self.process, self.seat, self.rank, self.local_rank = process, seat, seat, local_rank
        self.task = SimpleNamespace(progress=progress, stdout=Path(f"rank-{seat}"))
        self.status: int | None = None

    @property
    def exit(self) -> int | None:
        return self.status if self.status is not None else -9 if self.process.is_dead else None


class Pool:
    """The workers of one node; `start` is called by the product."""

    has_script_collectives = False

    def __init__(self, job: "LiveJob", node: int) -> None:
        self._job, self._node = job, node
        self.running: list[SimulatedWorker] = []
        self.hangs = SimpleNamespace(reset_waits=lambda: None)

    @contextmanager
    def starting(self) -> Iterator[None]:
        yield

    def start(
        self, round: RoundInfo, *, local_rank: int, seat: int, joins: bool = False, rank: int | None = None
    ) -> None:
        progress = Progress()
        if rank is not None:
            progress.assigned = rank
        worker = SimulatedWorker(Process(f"worker-{seat}@{self._node}", self._node), seat, local_rank, progress)
        self.running.append(worker)
        self._job.start_worker(worker, joins=joins)


class Controller(MembershipController):
    _rank_log = SimpleNamespace(follow=lambda *_: None)  # type: ignore[assignment]


class Progresses:
    """The module `progress` in a process that has the memory of many workers."""

    def __init__(self, world: World, known: dict[str, Progress]) -> None:
        self._world, self._known = world, known

    @property
    def here(self) -> Progress:
        return self._known[self._world.process.name]

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, self.here.phase = self.here.phase, phase
        try:
            yield
        finally:
            self.here.phase = before


@dataclass(slots=True, eq=False)
class LiveJob:
    """A run of one node that loses workers and gets new ones."""

    world: World
    faults: Faults
    strategy: str
    workers: int
    spares: int
    steps: int
    progresses: dict[str, Progress] = field(default_factory=dict)
    connections: dict[str, Connections] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    ended: str = ""  # how the run ended: "completed", or why it has to restart
    states: dict[int, tuple[Process, bytes]] = field(
        default_factory=dict
    )  # by step, of the first worker that got there
    plans: dict[int, tuple[str, object]] = field(default_factory=dict)  # by membership
    violations: list[Violation] = field(default_factory=list)
    messages: Messages = field(init=False)
    plan: RunPlan = field(init=False)

    def __post_init__(self) -> None:
        self.messages = Messages(self.world, self.faults, 0, lambda node, other: True)
        self.plan = RunPlan((SamplePlan(samples=12 * self.steps, batch=12, epochs=1, seed=7),))

    def store(self) -> Any:
        return Prefixed(f"holdfast/{ROUND}", self.messages)

    def supervise(self) -> None:
        """Supervise the run. If the supervisor dies, its workers die with it, and the run has ended."""
        try:
            self._supervise()
        except Dead:
            if self.world.process.is_dead:  # and not only the time is up
                self.ended = self.ended or "the supervisor was killed"
            for process in self.processes:
                process.is_dead = True
            raise

    def _supervise(self) -> None:
        """Do what a supervisor does in its loop: notice losses, and decide who trains."""
        config = RunConfig(script="t.py", workers=self.workers, recovery=self.strategy, spares=self.spares)
        pool = Pool(self, 0)
        round = RoundInfo(attempt=1, round=ROUND, address="", workers=(self.workers,))
        control = Controller(config, pool, round, Peers(ROUND, self.messages), Path("out"))  # type: ignore[arg-type]
        control.start()
        while not self.ended:
            self.world.poll(LOOK)
            failed = [worker for worker in pool.running if worker.has_failed]
            if failed and not control.can_continue():
                self._end("a worker failed, and the others cannot continue")
                break
            pool.running = [worker for worker in pool.running if not worker.has_failed]
            try:
                control.update()
            except Stranded as error:
                self._end(str(error))
                break
            if failed:
                control.fill_up()
            members = [worker.has_finished for worker in pool.running if not worker.is_in_reserve]
            if members and all(members):
                self._end("completed")
        for worker in pool.running:
            worker.process.is_dead = True

    def _end(self, how: str) -> None:
        self.world.record(f"the run ends: {how}")
        self.ended = how

    def start_worker(self, worker: SimulatedWorker, *, joins: bool) -> None:
        self.processes.append(worker.process)
        self.progresses[worker.process.name] = worker.task.progress

        def run() -> None:
            try:
                self._work(worker, joins=joins)
            except (WorkerLost, GroupBroken) as error:
                self.world.record(f"fails: {error}")
                worker.status = 1

        self.world.spawn(worker.process, run, self.world.rng.random())

    def _work(self, worker: SimulatedWorker, *, joins: bool) -> None:
        seat, progress = worker.seat, worker.task.progress
        progress.membership = -1 if joins else 0
        coordination = Coordination(
            seat,
            () if joins else tuple(range(self.workers)),
            self.store,
            seat=seat,
            is_joining=joins,
            rank_for_life=progress.assigned if joins else seat,
        )
        link = SimulatedLink(self.world, self.connections)
        live = SimulatedRecovery(self.strategy, self.workers, coordination, link)
        live.connect()
        model = Model()
        protected = Protected({"model": model})
        group = live.new_group(lambda: None)
        group.lay_out([[model.weight]])
        live.start(
            TrainingHooks(
                losses=LossEffects(self.strategy, self.plan),
                protected=protected,
                record=SimpleNamespace(
                    append=self._recorded, flush=lambda: None, enrol=lambda member: None, retire=lambda: None
                ),  # type: ignore[arg-type]
                attempt=1,
                record_steps=lambda: None,
                inject=lambda step: None,
                restore_shard=lambda rank, step: None,
                work=SimpleNamespace(has_stepped=False, is_pending=False),  # type: ignore[arg-type]
            )
        )
        progress.is_checked = True
        progress.phase = Phase.TRAINING
        step = live.join() if joins else 0
        while step < self.steps:
            live.reach_boundary(step)
            self._check_state(step, model)
            if not coordination.gate.passes(step):
                try:
                    live.at_boundary(step)
                except Suspended:
                    live.suspend()
                    step = live.join()
                    continue
            progress.pass_boundary(step)
            live.begin_step(step)
            self._train(live, group, model, step)
            step += 1
        live.reach_boundary(step)
        live.at_boundary(step, last=True)
        self._check_state(step, model)
        progress.phase = Phase.CLOSING
        self._save_last(coordination)
        progress.phase = Phase.DONE

    def _save_last(self, coordination: Coordination) -> None:
        """Wait until all members have come to the end, as the save of the last state does."""
        store = Prefixed(f"end/{coordination.number}", self.store())
        if store.add("count", 1) == len(coordination.members):
            store.set("all", "")
        while not store.check(["all"]):
            if coordination.is_outdated:
                raise recovery.restart_needed("a member was lost while the last state was saved")
            self.world.poll(0.005)

    def _recorded(self, what: Any) -> None:
        """Check that all members of a membership recover by the same plan."""
        said = (what.step, what.members, what.lost, what.missing, what.kept, what.redone, what.behind)
        name, other = self.plans.setdefault(what.number, (self.world.process.name, said))
        self.world.record(f"regroups {what.number}: {said}")
        if said != other:
            self._violated(f"{self.world.process.name} recovers by {said}, and {name} by {other}")

    def _violated(self, what: str) -> None:
        self.world.record(f"VIOLATION {what}")
        self.violations.append(Violation(what))

    def _check_state(self, step: int, model: Model) -> None:
        """Check that all members that live have the same state; a result that only lost members had never existed."""
        process, state = self.world.process, model.weight.detach().numpy().tobytes()
        other, theirs = self.states.get(step, (process, state))
        if other.is_dead:
            theirs = state
        self.states[step] = process, theirs
        if state != theirs:
            self._violated(f"{process.name} has another state at step {step} than {other.name}")

    def _train(self, live: LiveRecovery, group: Any, model: Model, step: int) -> None:
        """Train one step: sum gradients over the members, and step if the step is not dropped."""
        self.world.sleep(0.05 * self.world.rng.random())
        self.faults.point("training")
        group.begin()
        model.weight.grad = torch.full_like(model.weight, float(live.member + step + 1) * self.workers)
        values = (model.weight.grad.flatten() / self.workers).clone()
        work = group.allreduce([values])
        self.faults.point("backward")
        try:
            work.wait()
            failed = None
        except RuntimeError as error:
            failed = error
        if failed is not None:
            if not live.guard.recover(group):
                raise failed
        else:
            group.unpack()
            live.guard.complete(group)
        if not live.is_dropped(step):
            total = model.weight.grad
            model.weight.mul_(31).add_(total).remainder_(8191)
        live.end_step(int(not live.is_dropped(step)))
        model.weight.grad = None
        self.faults.point("boundary")


def replacements(world: World, job: LiveJob) -> list[tuple[Any, str, Any]]:
    """Return what the product's modules get in place of torch's stores, the process and its shared memory."""
    progress = Progresses(world, job.progresses)

    def restart_needed(why: str) -> WorkerLost:
        progress.here.has_fallen_back = True
        return WorkerLost(f"{why}: the run restarts from its newest snapshot.")

    def leave(status: int) -> None:
        world.record(f"exits with {status}")
        world.process.is_dead = True
        raise Dead

    SimulatedWatch.world = SimulatedThread.world = world
    return [
        *((module, "PrefixStore", Prefixed) for module in (membership, rendezvous, rank_values)),
        *((module, "progress", progress) for module in (membership, recovery, handover, state_transfer)),
        (membership, "MembershipWatch", SimulatedWatch),
        (membership, "threading", SimpleNamespace(Thread=SimulatedThread)),
        (membership, "os", SimpleNamespace(_exit=leave)),
        *((module, "restart_needed", restart_needed) for module in (recovery, backward_guard, handover)),
    ]


def play_live(seed: int) -> Outcome:
    """Play the schedule of `seed` for a run that recovers live."""
    world = World(seed)
    rng = world.rng
    rates = {"crash": rng.choice((0.0, 0.003, 0.01, 0.03))}
    faults = Faults(world, rates, left=rng.randint(1, 4))
    strategy = rng.choice(("replay", "forward", "skip"))
    job = LiveJob(world, faults, strategy, rng.randint(2, 5), rng.randint(0, 2), rng.randint(3, 8))
    if seed % 4 == 1:  # the other schedules stay as they were when they showed defects
        rates |= {"pause": rng.choice((0.0, 0.003, 0.01)), "lost answer": rng.choice((0.0, 0.003, 0.01))}
    with simulated(world, *replacements(world, job)):
        world.spawn(Process("supervisor", 0), job.supervise)
        world.run(LIVE_LIMIT)
    violations = [*map(str, job.violations), *failures(world)]
    if not job.ended:
        violations.append("the workers have neither finished nor given up")
    return Outcome(seed, world.digest, tuple(violations), faults.struck, tuple(world.trace), world.now)
