"""The loop of a supervisor: starts the workers, detects failures, restarts the workers, and ends the run.

The loop never reads or writes snapshots: after a failure, the workers themselves find the newest good snapshot.
"""

import gc
import signal
import time
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.events import SECOND_SIGNAL, SUPERVISED_ONLY, Judged, Preempt, Restart
from holdfast.finding import counted
from holdfast.history import gather
from holdfast.history.tail import Finish, finish
from holdfast.process import PREEMPTED
from holdfast.progress import Phase
from holdfast.runs.config import RunConfig
from holdfast.runs.lock import FolderWatch
from holdfast.supervise.checkpoint_place import Checkpoints
from holdfast.supervise.disk_space import DiskSpace
from holdfast.supervise.display import Display, Journal
from holdfast.supervise.failure_cause import FirstFailure, first_failure, lost_peer, returned_node, surrender
from holdfast.supervise.folding import HistoryFolding
from holdfast.supervise.hang_detection import RemoteProgress
from holdfast.supervise.nodes import news
from holdfast.supervise.nodes.connection import Unreachable
from holdfast.supervise.nodes.multi_node import RunEndWatch
from holdfast.supervise.nodes.rendezvous import (
    Node,
    Rendezvous,
    RoundInfo,
    RunEnded,
    TooFewNodes,
    node_names,
)
from holdfast.supervise.restart_policy import RestartPolicy
from holdfast.supervise.slow_nodes import NodeSteps
from holdfast.supervise.stop_signals import StopRequested, stop_signals
from holdfast.supervise.straggler_reports import StragglerReports
from holdfast.supervise.verdict import RunVerdict, Word, done_elsewhere
from holdfast.supervise.workers.membership_control import MembershipController, Stranded
from holdfast.supervise.workers.pool import WorkerPool, output_files
from holdfast.supervise.workers.process import WorkerProcess
from holdfast.supervise.workers.scaler import Scaler
from holdfast.supervise.workers.standby import Standby

TICK = 0.02
ASK_NODES = 0.2
COMPARE = 1.0
DYING = 0.3
ENDING = 5.0


class RunLoop:
    """The work of a supervisor from the first start of its workers to the end of the run."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        node: Node,
        nodes: Rendezvous,
        journal: Journal,
        display: Display,
        policy: RestartPolicy,
        checkpoints: Checkpoints,
        run_end: RunEndWatch,
        newest: int | None,
    ) -> None:
        self._config, self._out, self._node, self._nodes = config, out, node, nodes
        self._journal, self._display, self._policy = journal, display, policy
        self._checkpoints, self._run_end = checkpoints, run_end
        self._folder = FolderWatch(out)
        self._pool = WorkerPool(config, out)
        self._scaler = Scaler(out, config.workers, journal, display)
        self._membership = self._controller(RoundInfo(attempt=0, round="", address="", workers=(config.workers,)))
        self._remote = RemoteProgress()
        self._space = DiskSpace(
            (out, Path(config.checkpoints or out / "checkpoints")), lambda line: display.say(line, style="yellow")
        )
        self._stragglers = StragglerReports(self._pool, journal, display, config.replace_slow)
        self._folding = HistoryFolding(out / "history", checkpoints.newest_here)
        self._standby: Standby | None = None
        if config.spares and config.recovery == "restart":
            self._standby = Standby(config, out, self._pool, nodes, display.say)
        self._first_loss: FirstFailure | None = None  # of this attempt, if the others continued after it
        self._is_live = config.recovery != "restart"
        self._restarts = self._signals_passed_on = 0
        self._newest = newest  # the step of the newest snapshot
        self._theirs: RunVerdict | None = None  # of the other nodes, if they completed the run without this one
        self._asked_nodes = self._compared = 0.0
        self._round: RoundInfo | None = None  # the last one that was shown to the user

    def _controller(self, round: RoundInfo) -> MembershipController:
        return MembershipController(
            self._config, self._pool, round, self._nodes.peers, self._out, wanted=self._scaler.wanted
        )

    def run(self) -> RunVerdict:
        """Start the workers, watch them, and restart them after failures, until the run ends; return its verdict."""
        # All workers share the objects that exist now: a garbage collection in one would copy their memory pages.
        gc.collect()
        gc.freeze()
        text = ""
        try:
            verdict = self._launch()
            while verdict is None:
                time.sleep(TICK)
                self._display.refresh()
                verdict = self._step()
            text = verdict.to_text()
            self._stragglers.end()
            if verdict is not self._theirs:  # otherwise the other nodes have recorded it
                self._journal.append(Judged(verdict.verdict, verdict.attempts, verdict.because))
            self._display.refresh(now=True)
            if verdict.verdict != "completed":
                self._nodes.stop(text)
            else:
                self._folding.finish(self._own_ranks)
            return verdict
        finally:
            if self._standby:
                self._standby.end()
            self._pool.kill()
            self._nodes.close(text)
            self._folding.close()

    def _launch(self) -> RunVerdict | None:
        workers = self._config.workers_at(self._restarts)
        if stop_signals.count:
            return self._verdict("preempted", "stopped before the workers were started; the same command continues")
        standby = self._standby.take_over() if self._standby else []
        try:
            round = self._nodes.meet(workers)
        except StopRequested:
            return self._verdict("preempted", "stopped while waiting for the other nodes")
        except RunEnded as over:
            return self._ended_by_others(str(over))
        except TooFewNodes:
            return self._verdict("gave-up", self._node.too_few(have_met=self._nodes.round is not None))
        self._pool.begin_attempt()
        self._remote = RemoteProgress()
        self._membership = self._controller(round)
        earlier = gather.sizes_of_ranks(self._out / "history")
        if standby:
            self._pool.running = standby
        else:
            self._membership.start()
        self._first_loss = None
        left = self._policy.left(self._newest)
        if self._restarts:
            self._journal.append(Restart(self._attempt, workers, newest=self._newest, left=left))
        else:
            self._journal.launch(self._config, self._attempt, workers, self._node.of)
        for line in round.news(self._round, self._node.of):
            self._display.say(line, style="yellow")
        self._round = round
        self._display.follow(round.ranks[0])
        self._display.output.copy(last=True)
        self._display.output.add(output_files(self._pool.running))
        restarts = f"; {left} of {counted(self._policy.limit, 'restart')} left" if self._restarts else ""
        started = round.started(workers, standby=bool(standby))
        self._display.say(f"attempt {self._attempt}: {started}{restarts}")
        self._checkpoints.send(earlier)  # what earlier attempts left, while the workers train
        return None

    def _ended_by_others(self, text: str) -> RunVerdict:
        verdict = RunVerdict.from_text(text) if text else None
        if verdict is None or verdict.verdict == "completed":
            self._theirs = self._run_end.verdict or self._run_end.look()
            if verdict and not self._theirs:
                self._theirs = done_elsewhere(verdict.attempts, verdict.because)
        return self._theirs or verdict or self._verdict("gave-up", "the other nodes have ended the run")

    def _step(self) -> RunVerdict | None:
        """Check the signals, the workers and the other nodes once; return a verdict if the run is over."""
        if stop_signals.count > self._signals_passed_on and (verdict := self._pass_on_signal()):
            return verdict
        for line in self._pool.late_start():
            self._display.say(line, style="yellow")
        self._pool.poll()
        messages = self._pool.failure_messages() if not stop_signals.count else []
        if messages and self._space.is_awaited(messages, time.monotonic()):
            return self._look_at_nodes(have_finished=False)
        self._pool.detect_hangs(self._membership.members.is_member, self._remote)
        self._stragglers.look(self._attempt)
        self._folding.look(time.monotonic(), self._own_ranks)
        self._pool.poll_dying()
        if stop_signals.count and (late := self._pool.late_to_stop(self._membership.members.is_member)):
            return self._end_late_stop(late)
        have_finished = self._pool.finish_in_order(others_are_ending=self._nodes.peers.is_ending())
        has_failed = bool(self._pool.failed)
        if self._folder.is_gone(now=has_failed or have_finished):
            moved = f"{self._out} was moved or removed while the run trained"
            return self._verdict("gave-up", f"{moved}: put it back, or name its new place with --out")
        if has_failed:
            if self._is_live and not stop_signals.count and self._membership.can_continue():
                return self._continue_without_failed()
            return self._restart(*self._find_failures())
        if self._is_live and (failure := self._update_membership()):
            return self._restart(failure)
        if self._standby and not stop_signals.count:
            self._standby.update(self._restarts)
        return self._look_at_nodes(have_finished=have_finished)

    def _pass_on_signal(self) -> RunVerdict | None:
        self._signals_passed_on = stop_signals.count
        if stop_signals.count > 1:
            self._pool.kill()
            return self._verdict("preempted", f"{SECOND_SIGNAL}; the newest snapshot stands")
        if self._standby:
            self._standby.end()
        self._journal.append(Preempt(self._attempt))
        self._pool.hangs.reset_idle()
        for worker in self._pool.running:
            worker.send_signal(signal.SIGTERM)
        self._display.say("asked the workers to save and stop; a second signal kills them")
        return None

    def _end_late_stop(self, late: list[WorkerProcess]) -> RunVerdict:
        self._display.output.copy(last=True)  # what follows is stacks
        self._pool.kill(stacks=True)
        logs = [log for worker in late if (log := self._pool.log_with_stacks(worker.rank))]
        where = f" (stacks of their threads: {', '.join(logs)})" if logs else ""
        ranks = f"rank{'s' * (len(late) > 1)} {', '.join(str(worker.rank) for worker in late)}"
        slow = f"{ranks} did not stop and made no progress after the signal{where}, so all workers were killed"
        return self._verdict("preempted", f"{slow}; the newest snapshot stands")

    def _continue_without_failed(self) -> RunVerdict | None:
        """Let the remaining workers continue and start replacements; return a verdict after too many failures."""
        self._display.output.remove(output_files(self._pool.failed))  # their last lines are stacks, for the logs
        reports = self._pool.remove_failed()
        was_member = self._membership.members.was_member
        members = [first_failure([report]) for seat, report in reports if was_member(seat)]
        spares = [first_failure([report]) for seat, report in reports if not was_member(seat)]
        self._first_loss = self._first_loss or (members or spares)[0]
        end = self._policy.after((members or spares)[0], self._pool.reached)  # every step counts as progress
        if not end:
            self._membership.update()  # first: the survivors wait for it
            self._membership.fill_up()
            self._display.output.add(output_files(self._pool.running))
        for failure in members:
            self._journal.detect(self._attempt, failure)
        for failure in spares:
            self._display.say(f"a worker in reserve {failure.message}; another is started", style="yellow")
        if end:
            self._pool.kill()
            return self._verdict(*end)
        if members:
            left = len(self._membership.report().inside)
            here = " of this node" if self._node.of > 1 else ""
            workers = f"{counted(left, 'worker')} of {self._config.workers}{here}"
            self._display.say(f"{workers} {'continues' if left == 1 else 'continue'} ({self._config.recovery})")
            self._say_rank_changes()
        return None

    def _say_rank_changes(self) -> None:
        for line in self._membership.news():
            self._display.output.copy()  # lines printed before the change come first
            self._display.say(line)

    def _update_membership(self) -> FirstFailure | None:
        try:
            if self._node.of == 1:
                self._scaler.update(self._membership, self._pool, self._attempt)
            self._membership.update()
        except Stranded as error:
            return lost_peer(str(error))
        except Unreachable as error:
            return self._lost_host(error)
        self._say_rank_changes()
        is_left_behind = self._nodes.peers.is_left_behind()
        return lost_peer("the other nodes continue without this one") if is_left_behind else None

    def _find_failures(self) -> list[FirstFailure]:
        """Kill all workers, and return the failure that caused all others, and the reason why they could not recover."""
        # Peers of a killed worker may fail before the kernel reports the kill, and say why only after that.
        deadline = time.monotonic() + DYING
        while True:
            failure = first_failure(exits := self._pool.exit_reports())
            reason = surrender(exits) if self._is_live and failure.kind != "peer" else None
            is_clear = failure.kind != "peer" and (reason or not (self._is_live and self._membership.will_say_why))
            if is_clear or time.monotonic() > deadline:
                break
            time.sleep(TICK)
        has_hang = failure.kind == "hang"
        if has_hang:
            self._display.output.copy(last=True)  # what follows is stacks, which belong in the logs
        self._pool.kill(stacks=has_hang)
        if has_hang:
            failure = failure.with_stacks(self._pool.log_with_stacks(failure.rank))
        self._display.output.copy(last=True)
        for worker in self._pool.running:
            worker.append_error_to_log()  # after the last copy: the journal shows the error that counts
        return [failure, reason] if reason else [failure]

    def _restart(self, failure: FirstFailure, reason: FirstFailure | None = None) -> RunVerdict | None:
        """Start all workers again after `failure`; return a verdict if the run must end instead.

        `reason` says why the other workers could not recover from it."""
        self._journal.detect(self._attempt, failure)
        if reason:
            self._journal.detect(self._attempt, reason)
        if stop_signals.count:
            return self._verdict("preempted", f"a worker failed while it was to save: {failure.message}")
        if end := self._end_reached():
            after = f"{failure.line}, after its loop; the run itself was {end}, and its state is saved"
            return self._verdict("script-error", f"{after}. The part of a script after its loop is not tried again")
        self._newest = self._checkpoints.newest()
        if verdict := self._policy.after(failure, self._newest):
            cause = self._first_loss if failure.kind == "peer" else None  # what the others could not recover from
            return self._verdict(verdict[0], f"{cause.line}; after that, {verdict[1]}" if cause else verdict[1])
        self._pool.kill()
        self._restarts += 1
        return self._launch()

    def _end_reached(self) -> Finish | None:
        """If a failed worker had finished training, wait briefly for the others; return how the run ended, or None."""
        if not any(worker.task.progress.phase is Phase.DONE for worker in self._pool.failed):
            return None
        deadline = time.monotonic() + ENDING
        while (end := self._finish()) is None and time.monotonic() < deadline:
            time.sleep(TICK)
        return end

    def _finish(self) -> Finish | None:
        with suppress(HoldfastError, OSError):  # the audit reports what cannot be read
            return finish(self._out / "history")
        return None

    def _look_at_nodes(self, *, have_finished: bool) -> RunVerdict | None:
        """Exchange progress with the other nodes, and handle lost nodes; return a verdict if the run is over."""
        now = time.monotonic()
        if now - self._asked_nodes < (ASK_NODES if self._node.of > 1 else 0.0):
            return None
        self._asked_nodes = now
        try:
            if self._node.of > 1 and now - self._compared >= COMPARE:
                self._compared = now
                self._exchange_progress()
            is_suspicious = self._membership.is_suspicious
            return self._act_on(news.ask(self._nodes, have_finished=have_finished, is_suspicious=is_suspicious))
        except Unreachable as error:
            return self._restart(self._lost_host(error))

    def _act_on(self, found: news.News | None) -> RunVerdict | None:
        match found:
            case news.AllNodesFinished():
                return self._completed()
            case news.StoppedElsewhere(verdict):
                return RunVerdict.from_text(verdict)
            case news.NodesWaiting(nodes):
                return self._restart(self._arrival_of(nodes))
            case news.NodesSilent(nodes):
                return self._lose_nodes(nodes)
            case _:
                return None

    def _arrival_of(self, nodes: list[int]) -> FirstFailure:
        """Return why all workers restart for waiting nodes: they come back, or the workers of one of them have failed."""
        if set(nodes) & set(self._nodes.peers.present):
            return lost_peer("another node starts again")
        return returned_node(f"{node_names(nodes)} came back")

    def _exchange_progress(self) -> None:
        here, steps = self._membership.local_progress(), self._stragglers.latest_steps()
        others = self._nodes.peers.exchange_progress([here.place, here.moved, self._node.rank, steps])
        places = [(place[0], place[1]) for place, *_ in others if place is not None]
        self._remote = RemoteProgress(min(places, default=None), sum(moved for _, moved, *_ in others))
        if self._nodes.peers.decides:
            latest = {node: NodeSteps(*steps) for _, _, node, steps in others if steps is not None}
            self._stragglers.look_at_nodes(latest | ({self._node.rank: steps} if steps else {}))

    def _lose_nodes(self, nodes: list[int]) -> RunVerdict | None:
        why = f"{node_names(nodes)} {'was' if len(nodes) == 1 else 'were'} silent for too long"
        is_live = self._is_live and not stop_signals.count and self._membership.can_replace(nodes)
        ranks = self._membership.members_of(nodes) if is_live else []
        if not is_live or not self._nodes.drop(nodes):
            return self._restart(lost_peer(why))
        failures = [lost_peer(f"was lost with {node_names(nodes)}", rank) for rank in ranks]
        if failures and (end := self._policy.after(failures[0], self._pool.reached)):
            return self._verdict(*end)
        if failure := self._update_membership():
            return self._restart(failure)
        for failure in failures:
            self._journal.detect(self._attempt, failure)
        self._display.say(f"{why}: the others continue ({self._config.recovery})", style="yellow")
        return None

    def _lost_host(self, error: Unreachable) -> FirstFailure:
        host = self._nodes.round.host if self._nodes.round else 0
        return lost_peer(f"node {host}, at which the nodes meet, is lost ({error})")

    def _completed(self) -> RunVerdict:
        if any(worker.exit == PREEMPTED for worker in self._pool.running):
            return self._verdict("preempted", "the workers saved and stopped; the same command continues")
        end = self._finish()
        why = f"{end}" if end and end.stopped else "all workers have finished"
        is_checked = any(worker.task.progress.is_checked for worker in self._pool.running)
        note = "" if is_checked else f"; {SUPERVISED_ONLY}"  # the script does not run the loop of holdfast
        if self._config.failures and not is_checked:
            note += ", and --inject had no effect: failures strike in run.batches()"
        if self._standby and not is_checked:
            note += ", and --spares had no effect: standby workers wait in run.protect()"
        return self._verdict("completed", f"{why}{note}")

    def _verdict(self, word: Word, because: str) -> RunVerdict:
        return RunVerdict(verdict=word, attempts=self._attempt, because=because)

    @property
    def _own_ranks(self) -> list[int] | None:
        """The ranks of this node, whose histories it folds; None for all."""
        return None if self._node.of == 1 else [worker.rank for worker in self._pool.running]

    @property
    def _attempt(self) -> int:
        return self._nodes.next_attempt - 1
