"""Keeps a run going: starts the workers, sees who fails, starts them again from the newest snapshot, and says how it ended.

It never touches what the workers save: after a failure they find the newest good snapshot by themselves.
"""

import gc
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from holdfast.ddp.config import IDENTITY, RunConfig
from holdfast.ddp.preemption import PREEMPTED
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import Detect, Judged, Launch, Preempt, Restart, What
from holdfast.history import HistoryWriter, read_history
from holdfast.supervise import verdict as verdicts
from holdfast.supervise.agent import WarmAgent
from holdfast.supervise.casualty import Casualty, casualty
from holdfast.supervise.checkpoints import Checkpoints, local, settled
from holdfast.supervise.folder import claimed
from holdfast.supervise.live import View
from holdfast.supervise.rendezvous import Node, Nodes
from holdfast.supervise.verdict import Verdict, Word
from holdfast.supervise.warm import warm

TICK = 0.02
ASK_NODES = 0.2
DYING = 0.3


def supervise(
    config: RunConfig,
    out: Path,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    preload: tuple[str, ...] = (),
    console: Console | None = None,
) -> Verdict:
    """Run the script with its workers until it is completed, preempted or given up; `out` may hold an earlier part of it.

    SIGTERM or SIGINT ask the workers to save and stop; a second one kills them. Several nodes give the same command
    with a `node_rank` of their own, and meet at `rendezvous`.
    """
    node = Node(rank=node_rank, of=nnodes, endpoint=rendezvous)
    config.check_targets(nnodes)
    script = Path(config.script)
    if not script.is_file():
        raise BadInput(f"there is no script {config.script}: name a Python file.")
    config = replace(config, script=str(script.resolve()), checkpoints=settled(config.checkpoints))
    out = local(out)
    checkpoints = Checkpoints(out, config.checkpoints)
    found = checkpoints.try_out(alone=nnodes == 1)
    who = "supervisor" if nnodes == 1 else f"supervisor-{node_rank}"
    with claimed(out, config, node_rank):
        attempt = max(_last_attempt(out / "history" / f"{who}.jsonl"), found.attempt) + 1
        view = View(console or Console(stderr=True), out / "history", who)
        with HistoryWriter(out / "history", who) as history, view:  # first: importing counts as the run's time
            warm(preload)
            verdict = _Supervisor(config, out, node, history, view, attempt, checkpoints, found.newest).run()
            _send(checkpoints, view)
            return verdict


class _Supervisor:
    """One supervisor's work in one folder, from the first start of its workers to the verdict."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        node: Node,
        history: HistoryWriter,
        view: View,
        attempt: int,
        checkpoints: Checkpoints,
        newest: int | None,
    ) -> None:
        self._config, self._node, self._checkpoints = config, node, checkpoints
        self._history, self._view = history, view
        identity = {name: getattr(config, name) for name in IDENTITY} | {"script": Path(config.script).name}
        self._nodes = Nodes(node, identity, checkpoints)
        self._nodes.next_attempt = attempt
        self._agent = WarmAgent(config, out, self._nodes)
        self._restarts = 0
        self._newest = newest
        self._asked = self._passed_on = 0
        self._asked_nodes = 0.0
        self._shown: set[str] = set()

    def run(self) -> Verdict:
        """Start, watch, and start again until there is a verdict."""
        # What is here now is shared with every worker: a collection in one would copy its pages for nothing.
        gc.collect()
        gc.freeze()
        with self._listening():
            try:
                verdict = self._launch()
                while verdict is None:
                    time.sleep(TICK)
                    self._view.refresh()
                    verdict = self._step()
                return self._conclude(verdict)
            finally:
                self._agent.end()
                self._nodes.shutdown()
                self._nodes.leave()

    def _step(self) -> Verdict | None:
        """Look at the workers, the signals and the other nodes once."""
        if self._asked > self._passed_on and (verdict := self._pass_on()):
            return verdict
        state = self._agent.look()
        if state == WorkerState.FAILED:
            return self._recover(self._casualty())
        return self._heed_nodes(finished=state == WorkerState.SUCCEEDED)

    def _casualty(self) -> Casualty:
        """Who failed first. The peers of a worker that dies may end before the kernel has done with it: wait for it."""
        deadline = time.monotonic() + DYING
        while (lost := casualty(self._agent.deaths())).kind == "peer" and time.monotonic() < deadline:
            time.sleep(TICK)
        self._agent.end()
        return lost

    def _heed_nodes(self, *, finished: bool) -> Verdict | None:
        """End with all nodes or not at all: what one of them finds holds for the run."""
        now = time.monotonic()
        if now - self._asked_nodes < (ASK_NODES if self._node.of > 1 else 0.0):
            return None
        self._asked_nodes = now
        try:
            if finished and self._nodes.finish():
                return self._over()
            if (said := self._nodes.stopped()) is not None:
                return self._joined(said)
            if self._nodes.num_nodes_waiting() > 0:
                return self._recover(_peer("another node starts again"))
        except (RendezvousError, RuntimeError) as error:
            return self._lost_nodes(error)
        return None

    def _lost_nodes(self, error: Exception) -> Verdict:
        where = f"the rendezvous {self._node.endpoint}" if self._node.endpoint else "the store of the workers"
        return self._verdict("gave-up", f"{where} is lost ({_first_line(error)}); the same command goes on")

    def _over(self) -> Verdict:
        if PREEMPTED in self._agent.exits():
            return self._verdict("preempted", "the workers saved and stopped when asked; the same command goes on")
        return self._verdict("completed", "all workers have finished")

    def _recover(self, lost: Casualty) -> Verdict | None:
        """Say who failed; then start again, unless there is a reason not to."""
        self._report(lost)
        if self._asked:
            return self._verdict("preempted", f"a worker failed while it was to save: {lost.message}")
        newest = self._checkpoints.newest()
        # The snapshot of a first state, step 0, is no progress yet.
        progress, self._newest = (newest or 0) > (self._newest or 0), newest
        limit = self._config.max_restarts
        if why := verdicts.stop(lost, restarts=self._restarts, max_restarts=limit, progress=progress):
            return self._verdict(*why)
        self._agent.end()
        self._restarts += 1
        return self._launch()

    def _launch(self) -> Verdict | None:
        workers = self._config.workers_at(self._restarts)
        try:
            self._agent.launch(workers)
        except _Interrupted:
            return self._verdict("preempted", "stopped while waiting for the other nodes")
        except RendezvousClosedError:
            said = self._nodes.stopped()
            return self._joined(said) if said else self._verdict("gave-up", "the other nodes have ended the run")
        except RendezvousTimeoutError:
            return self._verdict("gave-up", f"fewer than {self._node.of} nodes came to {self._node.endpoint} in time")
        except (RendezvousConnectionError, RuntimeError) as error:
            return self._lost_nodes(error)
        self._note(self._started(workers))
        self._view.echo.follow(self._agent.printed())
        self._view.say(f"attempt {self._attempt}: {verdicts.count(workers, 'worker')} started")
        self._checkpoints.send()  # while they train: what earlier attempts left
        return None

    def _started(self, workers: int) -> Launch | Restart:
        if not self._restarts:
            argv = (self._config.script, *self._config.args)
            return Launch(self._attempt, workers, argv, nodes=self._node.of)
        return Restart(self._attempt, workers, newest=self._newest)

    def _pass_on(self) -> Verdict | None:
        """What SIGTERM or Ctrl-C asks for: at first a last save, and when it comes again, an end."""
        self._passed_on = self._asked
        if self._asked > 1:
            self._agent.end()
            return self._verdict("preempted", "killed by a second signal; the newest snapshot stands")
        self._note(Preempt(self._attempt))
        self._agent.tell(signal.SIGTERM)
        self._view.say("asked the workers to save and stop; a second signal kills them")
        return None

    def _report(self, lost: Casualty) -> None:
        who = (self._attempt, lost.rank, lost.local_rank)
        self._note(Detect(*who, lost.kind, lost.message, exit=lost.exit, signal=lost.signal))
        self._view.echo.copy()
        if lost.traceback and lost.kind == "error" and lost.traceback not in self._shown:
            self._shown.add(lost.traceback)
            self._view.show(f"rank {lost.rank} raised, in attempt {self._attempt}:", lost.traceback)
        else:
            self._view.say(lost.line, style="yellow")

    def _joined(self, said: str) -> Verdict:
        """Another node's verdict, as ours."""
        told = json.loads(said)
        return Verdict(verdict=told["verdict"], attempts=told["attempts"], because=told["because"])

    def _verdict(self, word: Word, because: str) -> Verdict:
        return Verdict(verdict=word, attempts=self._attempt, because=because)

    def _conclude(self, verdict: Verdict) -> Verdict:
        told = {"verdict": verdict.verdict, "attempts": verdict.attempts, "because": verdict.because}
        self._note(Judged(verdict.verdict, verdict.attempts, verdict.because))
        self._view.refresh(now=True)
        if verdict.verdict != "completed":
            self._nodes.stop(json.dumps(told))
        return verdict

    @property
    def _attempt(self) -> int:
        return self._nodes.meeting.attempt if self._nodes.meeting else 0

    def _note(self, what: What) -> None:
        self._history.append(what)
        self._history.flush()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Count SIGTERM and SIGINT while the run goes on."""

        def heard(_number: int, _frame: FrameType | None) -> None:
            self._asked += 1
            if self._nodes.waiting:
                raise _Interrupted

        before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Interrupted(Exception):
    """A signal came while the nodes were waiting for each other."""


def _send(checkpoints: Checkpoints, view: View) -> None:
    """Send this folder's histories to where the audit of any node finds them; they are here, whatever becomes of it."""
    try:
        checkpoints.settle()  # two at once could send a file's end in the wrong order
        checkpoints.send()
        checkpoints.settle()
    except HoldfastError as error:
        view.say(f"the histories of this node were not sent to {checkpoints}: {error}", style="yellow")


def _peer(message: str) -> Casualty:
    return Casualty(kind="peer", rank=-1, local_rank=-1, exit=None, signal=None, message=message)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _last_attempt(path: Path) -> int:
    """The number of the last attempt that the supervisor of this node has started here."""
    if not path.exists():
        return 0
    attempts = [event.fields.get("attempt") for event in read_history(path).events]
    return max((number for number in attempts if isinstance(number, int)), default=0)
