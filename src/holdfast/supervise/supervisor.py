"""The supervisor of a run: prepares its folder and imports, and runs the loop that keeps its workers training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from holdfast.errors import HoldfastError
from holdfast.history.log import require_files
from holdfast.history.tail import finish, following
from holdfast.runs.config import RunConfig
from holdfast.supervise import start_up
from holdfast.supervise.checkpoint_place import Checkpoints, first_weights, full_place, local_folder
from holdfast.supervise.display import Display, Journal, last_attempt
from holdfast.supervise.nodes.multi_node import MultiNodeRendezvous, RunEndWatch
from holdfast.supervise.nodes.rendezvous import LOST_AFTER, Node, Rendezvous
from holdfast.supervise.preload import import_heavy, script_file, warm
from holdfast.supervise.restart_policy import RestartPolicy
from holdfast.supervise.run_folder import claimed, with_seed_of
from holdfast.supervise.run_loop import RunLoop
from holdfast.supervise.stop_signals import stop_signals
from holdfast.supervise.verdict import RunVerdict, done_before


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
    may_change: Sequence[str] = (),
    console: Console | None = None,
) -> RunVerdict:
    """Run `config.script` in worker processes until the run completes, is preempted or fails; return its verdict.

    The command `holdfast run` calls this function. Call it in the main thread of a process that has not started CUDA.
    After SIGTERM or SIGINT, the workers save and stop. After a second signal, the supervisor kills them.

    Args:
        config: the script, the number of workers, and how to save and recover.
        out: the folder of the run. If the folder contains an earlier part of the same run, the run continues. A run that
            is complete is not started again.
        nnodes: the number of nodes. Call this function on each node, with the same arguments except for `node_rank`.
        node_rank: the number of this node, counted from 0.
        rendezvous: `host:port` of the first node, where the nodes meet.
        min_nodes: the smallest number of nodes with which the run continues after other nodes are lost; by default half
            of `nnodes`, rounded up. With fewer nodes, the run waits for nodes to return, and gives up after some minutes.
        lost_after: the seconds of silence after which a node counts as lost, by default 15.
        preload: the modules to import before workers are forked. None: well-known libraries that the script imports.
        may_change: the names of script arguments that may change when the run in `out` is continued. All other script
            arguments must be the same as in the earlier command.
        console: the console that shows the progress; stderr by default.

    Raises:
        BadInput: if the arguments are wrong, or `out` holds another run."""
    least = (nnodes + 1) // 2 if min_nodes is None else min_nodes
    node = Node(rank=node_rank, of=nnodes, endpoint=rendezvous, least=least, lost_after=lost_after)
    config.check_world(nnodes)
    script = script_file(config)
    name = config.script if config.module else str(script)
    config = replace(config, script=name, checkpoints=full_place(config.checkpoints))
    out = local_folder(out)
    checkpoints = Checkpoints(out, config.checkpoints)
    config = replace(config, source=first_weights(config.source, out, has_begun=bool(checkpoints.newest())))
    contents = checkpoints.try_out(alone=nnodes == 1)
    who = "supervisor" if nnodes == 1 else f"supervisor-{node_rank}"
    config = with_seed_of(out, config)
    history = out / "history"
    has_saved = contents.newest is not None or contents.attempt > 0 or checkpoints.wrong is not None
    with stop_signals.listening(), claimed(out, config, node_rank, may_change=may_change, has_saved=has_saved):
        require_files(history)  # otherwise every attempt of a worker would fail on it
        command = (Path(config.script).name, *config.args)
        run_end = RunEndWatch(out, checkpoints, contents, command, extends=config.extend)
        if (end := finish(history)) and not config.extend:
            return done_before(end, contents.newest)
        attempt = following(max(last_attempt(history), contents.attempt), out)
        policy = RestartPolicy(config.max_restarts, contents.newest)
        display = Display(console or Console(stderr=True), history, who, policy)
        with Journal(history, who, display) as journal, display:  # importing counts as the run's time
            if not stop_signals.count:
                with start_up.part("import its compiler", display.show_status):
                    warm(preload or (), config.import_folder)
                with start_up.part("import libraries of the script", display.show_status):
                    names = import_heavy(script) if preload is None else []
                if names:
                    display.say(f"imported {', '.join(names)} once for all workers (--preload none turns this off)")
            if summary := start_up.take_summary():
                display.say(summary)
            nodes = Rendezvous(attempt)
            if nnodes > 1:
                identity = config.identity | {"script": script.name}  # its folder may differ from node to node
                nodes = MultiNodeRendezvous(
                    node, identity, checkpoints, attempt=attempt, say=display.say, run_end=run_end
                )
            loop = RunLoop(config, out, node, nodes, journal, display, policy, checkpoints, run_end, contents.newest)
            verdict = loop.run()
            try:  # to the place where the audit of any node finds them
                checkpoints.finish_sending()  # two calls at once could send the end of a file in the wrong order
                checkpoints.send()
                checkpoints.finish_sending()
            except HoldfastError as error:
                display.say(f"the histories of this node were not sent to {checkpoints}: {error}", style="yellow")
            return verdict
