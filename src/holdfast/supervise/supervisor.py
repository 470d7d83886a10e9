"""Keeps a run going: starts the workers, sees who fails, starts them again from the newest snapshot, and says how it ended.

It never touches what the workers save: after a failure they find the newest good snapshot by themselves.
"""

import gc
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from holdfast.errors import BadInput, HoldfastError
from holdfast.events import SECOND_SIGNAL, SUPERVISED_ONLY, Judged, Preempt, Restart
from holdfast.history.log import require_files
from holdfast.history.tail import Finish, finish, following
from holdfast.process import PREEMPTED
from holdfast.runs.config import RunConfig
from holdfast.supervise.checkpoint_place import Checkpoints, beginning, local, settled
from holdfast.supervise.display import View
from holdfast.supervise.failure_cause import Casualty, casualty, lost_peer
from holdfast.supervise.hang_detection import RemoteProgress
from holdfast.supervise.journal import Journal, last_attempt
from holdfast.supervise.nodes.connection import Unreachable
from holdfast.supervise.nodes.multi_node import Nodes
from holdfast.supervise.nodes.node import LOST_AFTER, Node, several
from holdfast.supervise.nodes.rendezvous import Rendezvous, RoundInfo, RunEnded, SingleNodeRendezvous
from holdfast.supervise.nodes.run_end import Ended
from holdfast.supervise.preload import import_heavy, warm
from holdfast.supervise.restart_policy import RestartPolicy
from holdfast.supervise.run_folder import Home, claimed, continued
from holdfast.supervise.scaling import Scaling
from holdfast.supervise.stop_signals import StopRequested, asked
from holdfast.supervise.verdict import RunVerdict, Word, count, done_before, done_elsewhere
from holdfast.supervise.workers.agent import Stranded, WarmAgent

TICK = 0.02
ASK_NODES = 0.2
COMPARE = 1.0
DYING = 0.3
ENDING = 5.0


def supervise(
    config: RunConfig,
    out: Path,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    min_nodes: int | None = None,
    lost_after: float = LOST_AFTER,
    preload: Sequence[str] | None = None,
    may_change: tuple[str, ...] = (),
    console: Console | None = None,
) -> RunVerdict:
    """Run the script with its workers until it is completed, preempted or given up; `out` may hold an earlier part of it.

    If that part is all of it, nothing is started. What the script is given must be what it was given before, but for
    the arguments that `may_change`.

    SIGTERM or SIGINT ask the workers to save and stop; a second one kills them. Several nodes give the same command
    with a `node_rank` of their own, and meet at `rendezvous`. A node that was not heard of for `lost_after` seconds is
    lost; `min_nodes` of them, by default half, go on without it. Modules in `preload` are imported before workers are
    forked; if it is None, those that the script is seen to import.
    """
    least = (nnodes + 1) // 2 if min_nodes is None else min_nodes
    node = Node(rank=node_rank, of=nnodes, endpoint=rendezvous, least=least, lost_after=lost_after)
    config.check_world(nnodes)
    script = Path(config.script)
    if not script.is_file():
        raise BadInput(f"there is no script {config.script}: name a Python file.")
    config = replace(config, script=str(script.resolve()), checkpoints=settled(config.checkpoints))
    out = local(out)
    checkpoints = Checkpoints(out, config.checkpoints)
    config = replace(config, source=beginning(config.source, out, has_begun=bool(checkpoints.newest())))
    found = checkpoints.try_out(alone=nnodes == 1)
    who = "supervisor" if nnodes == 1 else f"supervisor-{node_rank}"
    config = continued(out, config)
    with asked.listening(), claimed(out, config, node_rank, may_change=may_change, alone=nnodes == 1):
        require_files(out / "history")  # before a worker meets it, and is started again and again for it
        ended = Ended(out, checkpoints, found, extends=config.extend)  # before we look: what comes later is news
        if (end := finish(out / "history")) and not config.extend:
            return done_before(end, found.newest)
        attempt = following(max(last_attempt(out / "history" / f"{who}.jsonl"), found.attempt), out)
        tries = RestartPolicy(config.max_restarts, found.newest)
        view = View(console or Console(stderr=True), out / "history", who, tries)
        with Journal(out / "history", who, view) as record, view:  # importing counts as the run's time
            if not asked.times:
                warm(preload or (), script.resolve().parent)
                if preload is None and (names := import_heavy(script.resolve())):
                    view.say(f"imported {', '.join(names)} once for all workers (--preload none turns this off)")
            work = _Supervisor(config, out, node, record, view, tries, attempt, checkpoints, found.newest, ended)
            verdict = work.run()
            _send(checkpoints, view)
            return verdict


class _Supervisor:
    """One supervisor's work in one folder, from the first start of its workers to the verdict."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        node: Node,
        record: Journal,
        view: View,
        tries: RestartPolicy,
        attempt: int,
        checkpoints: Checkpoints,
        newest: int | None,
        ended: Ended,
    ) -> None:
        self._config, self._out, self._node, self._checkpoints = config, out, node, checkpoints
        self._record, self._view, self._tries = record, view, tries
        command = config.identity | {"script": Path(config.script).name}  # its folder may differ from node to node
        self._nodes: Rendezvous = Nodes(node, command, checkpoints) if node.of > 1 else SingleNodeRendezvous()
        self._nodes.next_attempt = attempt
        self._nodes.say, self._nodes.ended = view.say, self._ended_by_others
        self._agent = WarmAgent(config, out, self._nodes)
        self._restarts = self._passed_on = 0
        self._newest = newest
        self._ended = ended
        self._theirs: RunVerdict | None = None
        self._asked_nodes = self._compared = 0.0
        self._scaling = Scaling(out, config.workers, self._agent, record, view)
        self._home = Home(out)
        self._met: RoundInfo | None = None

    def run(self) -> RunVerdict:
        """Start, watch, and start again until there is a verdict."""
        # What is here now is shared with every worker: a collection in one would copy its pages for nothing.
        gc.collect()
        gc.freeze()
        asked.interruptible = lambda: self._nodes.waiting
        try:
            verdict = self._launch()
            while verdict is None:
                time.sleep(TICK)
                self._view.refresh()
                verdict = self._step()
            return self._conclude(verdict)
        finally:
            asked.interruptible = lambda: False
            self._agent.end()
            self._nodes.shutdown()
            self._nodes.leave()

    def _step(self) -> RunVerdict | None:
        """Look at the workers, the signals and the other nodes once."""
        if asked.times > self._passed_on and (verdict := self._pass_on()):
            return verdict
        state = self._agent.look()
        if self._home.is_gone(now=state in (WorkerState.FAILED, WorkerState.SUCCEEDED)):
            return self._verdict("gave-up", self._home.line)
        if state == WorkerState.FAILED:
            if self._config.recovery != "restart" and not asked.times and self._can_go_on():
                return self._go_on()
            return self._recover(self._casualty())
        if self._config.recovery != "restart" and (lost := self._regroup()):
            return self._recover(lost)
        return self._heed_nodes(finished=state == WorkerState.SUCCEEDED)

    def _can_go_on(self) -> bool:
        try:
            return self._agent.can_go_on()
        except Unreachable:
            return False

    def _regroup(self) -> Casualty | None:
        """Publish another membership, or follow the one that decides; why all are to start again, if they are."""
        try:
            if self._node.of == 1:
                self._scaling.heed(self._attempt)
            self._agent.regroup()
        except Stranded as error:
            return lost_peer(str(error))
        except Unreachable as error:
            return self._lost_host(error)
        self._tell_places()
        return lost_peer("the other nodes go on without this one") if self._nodes.peers.is_left_behind() else None

    def _casualty(self) -> Casualty:
        """Who failed first. The peers of a worker that dies may end before the kernel has done with it: wait for it."""
        deadline = time.monotonic() + DYING
        while (lost := casualty(self._agent.deaths())).kind == "peer" and time.monotonic() < deadline:
            time.sleep(TICK)
        hangs = lost.kind == "hang"
        if hangs:
            self._view.echo.copy(last=True)  # what comes then is stacks, which belong into the logs
        self._agent.end(stacks=hangs)
        self._view.echo.copy(last=True)
        self._agent.keep_last_words()  # now that nobody shows the logs any more: what counts of it is shown by itself
        return lost

    def _heed_nodes(self, *, finished: bool) -> RunVerdict | None:
        """End with all nodes or not at all: what one of them finds holds for the run."""
        now = time.monotonic()
        if now - self._asked_nodes < (ASK_NODES if self._node.of > 1 else 0.0):
            return None
        self._asked_nodes = now
        try:
            self._compare(now)
            if finished and self._nodes.peers.finish():
                return self._over()
            if (said := self._nodes.stopped()) is not None:
                return RunVerdict.from_text(said)
            if self._nodes.num_nodes_waiting() > 0:
                return self._recover(lost_peer("another node starts again"))
            if lost := self._nodes.peers.lost(suspected=self._agent.suspected):
                return self._lose(lost)
        except Unreachable as error:
            return self._recover(self._lost_host(error))
        return None

    def _lose(self, nodes: list[int]) -> RunVerdict | None:
        """Nodes are lost: the workers of the others go on without theirs, or all start again."""
        why = f"{several(nodes)} {'was' if len(nodes) == 1 else 'were'} not heard of any more"
        live = self._config.recovery != "restart" and not asked.times and self._agent.can_replace(nodes)
        ranks = self._agent.members_of(nodes) if live else []
        if not live or not self._nodes.drop(nodes):
            return self._recover(lost_peer(why))
        lost = [lost_peer(f"was lost with {several(nodes)}", rank) for rank in ranks]
        if lost and (end := self._tries.after(lost[0], self._agent.reached())):
            return self._verdict(*end)
        if again := self._regroup():
            return self._recover(again)
        for each in lost:
            self._record.detect(self._attempt, each)
        self._view.say(f"{why}: the others go on ({self._config.recovery})", style="yellow")
        return None

    def _compare(self, now: float) -> None:
        """Tell the other nodes how far our workers are, and hear it from them: who waits for whom may cross nodes."""
        if self._node.of == 1 or now - self._compared < COMPARE:
            return
        self._compared = now
        here = self._agent.here()
        told = self._nodes.peers.compare([here.place, here.moved])
        places = [(place[0], place[1]) for place, _ in told if place is not None]
        self._agent.elsewhere = RemoteProgress(min(places, default=None), sum(moved for _, moved in told))

    def _lost_host(self, error: Unreachable) -> Casualty:
        host = self._nodes.meeting.host if self._nodes.meeting else 0
        return lost_peer(f"node {host}, at which the nodes meet, is lost ({error})")

    def _over(self) -> RunVerdict:
        if PREEMPTED in self._agent.exits():
            return self._verdict("preempted", "the workers saved and stopped when asked; the same command goes on")
        end = self._finish()
        why = f"{end}" if end and end.stopped else "all workers have finished"
        only = "" if self._agent.is_checked else f"; {SUPERVISED_ONLY}"
        return self._verdict("completed", f"{why}{only}")

    def _recover(self, lost: Casualty) -> RunVerdict | None:
        """Say who failed; then start again, unless there is a reason not to."""
        self._record.detect(self._attempt, lost)
        if asked.times:
            return self._verdict("preempted", f"a worker failed while it was to save: {lost.message}")
        if end := self._end_reached():
            after = f"{lost.line}, after its loop; the run itself was {end}, and its state is saved"
            return self._verdict("script-error", f"{after}. What a script does after its loop is not tried again")
        self._newest = self._checkpoints.newest()
        if why := self._tries.after(lost, self._newest):
            return self._verdict(*why)
        self._agent.end()
        self._restarts += 1
        return self._launch()

    def _end_reached(self) -> Finish | None:
        """The end of the run, if a worker failed after that: the others are about to say that they have reached it, too."""
        if not self._agent.is_after_the_loop():
            return None
        deadline = time.monotonic() + ENDING
        while (end := self._finish()) is None and time.monotonic() < deadline:
            time.sleep(TICK)
        return end

    def _finish(self) -> Finish | None:
        with suppress(HoldfastError, OSError):  # what cannot be read is the audit's to tell
            return finish(self._out / "history")
        return None

    def _go_on(self) -> RunVerdict | None:
        """Let those that are left go on without those that failed."""
        self._view.echo.leave(self._agent.printed_by_fallen())
        members, others = self._agent.bury()
        lost = [casualty([death]) for death in members]
        first = (lost or [casualty([death]) for death in others])[0]
        why = self._tries.after(first, self._agent.reached())  # every step is progress: nothing is rolled back
        if not why:
            self._agent.go_on()  # first: those that are left wait for it
            self._view.echo.show_too(self._agent.printed())
        for each in lost:
            self._record.detect(self._attempt, each)
        for death in others:
            self._view.say(f"a worker in reserve {casualty([death]).message}; another is started", style="yellow")
        if why:
            self._agent.end()
            return self._verdict(*why)
        if not lost:
            return None
        left = self._agent.left()
        here = " of this node" if self._node.of > 1 else ""
        go = "goes" if left == 1 else "go"
        self._view.say(f"{count(left, 'worker')} of {self._config.workers}{here} {go} on ({self._config.recovery})")
        self._tell_places()
        return None

    def _tell_places(self) -> None:
        """Say who is which rank now, if that has changed; what they printed before is shown before."""
        for line in self._agent.news():
            self._view.echo.copy()
            self._view.say(line)

    def _launch(self) -> RunVerdict | None:
        workers = self._config.workers_at(self._restarts)
        if asked.times:
            return self._verdict("preempted", "asked to stop before the workers were started; the same command goes on")
        try:
            self._agent.launch(workers)
        except StopRequested:
            return self._verdict("preempted", "stopped while waiting for the other nodes")
        except RunEnded as over:
            return self._heed_end(str(over))
        except RendezvousTimeoutError:
            too_few = self._node.too_few(have_met=self._nodes.meeting is not None)
            return self._verdict("gave-up", f"{too_few} in time; the same command goes on")
        if self._restarts:
            self._record.note(Restart(self._attempt, workers, newest=self._newest, left=self._left))
        else:
            self._record.launch(self._config, self._attempt, workers, self._node.of)
        self._tell_nodes()
        self._view.echo.follow(self._agent.printed())
        left = f"; {self._left} of {count(self._tries.limit, 'restart')} left" if self._restarts else ""
        self._view.say(f"attempt {self._attempt}: {count(workers, 'worker')} started{left}")
        self._checkpoints.send()  # while they train: what earlier attempts left
        return None

    def _ended_by_others(self) -> str | None:
        """The verdict on a run that the other nodes have completed without this one."""
        self._theirs = self._ended.look()
        return self._theirs.to_text() if self._theirs else None

    def _heed_end(self, said: str) -> RunVerdict:
        """The verdict of the other nodes, which have ended the run while this one waited for them."""
        verdict = RunVerdict.from_text(said) if said else None
        if verdict is None or verdict.verdict == "completed":
            self._theirs = self._theirs or self._ended.look()
            if verdict and not self._theirs:
                self._theirs = done_elsewhere(verdict.attempts, verdict.because)
        return self._theirs or verdict or self._verdict("gave-up", "the other nodes have ended the run")

    def _tell_nodes(self) -> None:
        """Say which nodes go on, if not all; and where they meet, if that has changed."""
        before, self._met = self._met, self._nodes.meeting
        for line in self._met.news(before, self._node.of) if self._met else ():
            self._view.say(line, style="yellow")

    @property
    def _left(self) -> int:
        return self._tries.left(self._newest)

    def _pass_on(self) -> RunVerdict | None:
        """What SIGTERM or Ctrl-C asks for: at first a last save, and when it comes again, an end."""
        self._passed_on = asked.times
        if asked.times > 1:
            self._agent.end()
            return self._verdict("preempted", f"{SECOND_SIGNAL}; the newest snapshot stands")
        self._record.note(Preempt(self._attempt))
        self._agent.tell(signal.SIGTERM)
        self._view.say("asked the workers to save and stop; a second signal kills them")
        return None

    def _verdict(self, word: Word, because: str) -> RunVerdict:
        return RunVerdict(verdict=word, attempts=self._attempt, because=because)

    def _conclude(self, verdict: RunVerdict) -> RunVerdict:
        if verdict is not self._theirs:  # what they have completed they have put on record, too
            self._record.note(Judged(verdict.verdict, verdict.attempts, verdict.because))
        self._nodes.verdict = verdict.to_text()
        self._view.refresh(now=True)
        if verdict.verdict != "completed":
            self._nodes.stop(verdict.to_text())
        return verdict

    @property
    def _attempt(self) -> int:
        return self._nodes.next_attempt - 1


def _send(checkpoints: Checkpoints, view: View) -> None:
    """Send this folder's histories to where the audit of any node finds them; they are here, whatever becomes of it."""
    try:
        checkpoints.settle()  # two at once could send a file's end in the wrong order
        checkpoints.send()
        checkpoints.settle()
    except HoldfastError as error:
        view.say(f"the histories of this node were not sent to {checkpoints}: {error}", style="yellow")
