"""`holdfast run`: train a script to its end in spite of failures."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from holdfast.cli.console import Module, Script, complain
from holdfast.cli.final_audit import FinalAudit, final_audit
from holdfast.errors import BadInput
from holdfast.printable import printable

if TYPE_CHECKING:
    from holdfast.supervise.verdict import RunVerdict


_recovery = partial(typer.Option, rich_help_panel="Recovery")
_saving = partial(typer.Option, rich_help_panel="Saving")
_nodes = partial(typer.Option, rich_help_panel="Nodes")
_injection = partial(typer.Option, rich_help_panel="Fault injection")
_initial = partial(typer.Option, rich_help_panel="Initial weights")
_continuing = partial(typer.Option, rich_help_panel="Continuing a run")


def run(
    script: Script,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of SCRIPT, after --.")] = None,
    module: Module = False,
    workers: Annotated[int, typer.Option(help="Worker processes on this node.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/SCRIPT")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the sample order and of all random numbers.",
            show_default="of attach(seed=...), or of torch.manual_seed() before it, or 0",
        ),
    ] = None,
    preload: Annotated[
        str | None,
        typer.Option(
            help="Modules to import once, before the workers start, such as torchvision, or the word none.",
            show_default="well-known heavy libraries that SCRIPT imports first",
        ),
    ] = None,
    recovery: Annotated[
        str,
        _recovery(
            help="After a failure, restart all workers from the newest snapshot (restart), or continue with the surviving "
            "workers: replay (a replacement repeats its part of the step exactly), forward (finish the step without the "
            "lost samples), skip (drop the step), partial (sharded models: a lost shard returns to older values)."
        ),
    ] = "restart",
    spares: Annotated[
        int,
        _recovery(
            help="Extra workers that wait to replace lost workers, with --recovery replay, partial, forward or skip. With "
            "restart, 1 keeps a second set of all workers, which have built their models and take over after a failure."
        ),
    ] = 0,
    workers_after: Annotated[
        str,
        _recovery(
            help="The number of workers after each restart, such as 4,2,3; the last number also counts for later restarts. "
            "The samples stay the same.",
        ),
    ] = "",
    max_restarts: Annotated[
        int, _recovery(help="Failures in a row that the run survives; each newer snapshot starts the count again.")
    ] = 3,
    hang_timeout: Annotated[
        float | None,
        _recovery(
            help="Seconds that a worker may take for one step, or be suspended, before it is killed and replaced. For a "
            "start, a restore or a save it may take six times as long.",
            show_default="computed from the run's own steps",
        ),
    ] = None,
    replace_slow: Annotated[
        float | None,
        _recovery(
            help="Let a spare replace a worker that takes this many times as long to compute a step as the others, such as "
            "1.5.",
            show_default="slow workers are reported, but not replaced",
        ),
    ] = None,
    save_every: Annotated[int, _saving(help="Steps between two snapshots.")] = 50,
    keep_last: Annotated[int, _saving(help="Number of snapshots to keep.")] = 2,
    writer: Annotated[
        str,
        _saving(
            help="overlapped: write snapshots while training continues; blocking: write them while training waits."
        ),
    ] = "overlapped",
    save_bandwidth: Annotated[
        str | None,
        _saving(
            help="Largest number of bytes that each worker writes to snapshots in a second, in the background, such as "
            "200MB. The last save of a run, also after a stop signal, has no limit.",
            show_default="no limit",
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        _saving(
            help="Directory or URL (s3://bucket/run) for the snapshots. All nodes must reach it.",
            show_default="in the folder of the run",
        ),
    ] = None,
    witness_every: Annotated[
        int | None,
        _recovery(
            help="Steps between two comparisons of the states of all workers. If a bit has flipped, the run restarts from a "
            "snapshot saved before the flip. Needs replicated models, hybrid sharding, or --recovery replay.",
            show_default="never",
        ),
    ] = None,
    extend: Annotated[
        bool,
        _continuing(
            "--extend",
            help="Train a run for longer: the whole numbers in SCRIPT's arguments may be larger than before.",
        ),
    ] = False,
    may_change: Annotated[
        str, _continuing(help="Arguments of SCRIPT that may differ from the earlier command, such as log-interval,lr.")
    ] = "",
    init_from: Annotated[
        str | None,
        _initial(
            help="Start with the weights of another run, a Hugging Face model, a DCP folder (also of torchtitan or "
            "accelerate), or a safetensors or torch.save file."
        ),
    ] = None,
    init_names: Annotated[
        str,
        _initial(
            help="Names passed to run.protect() that are loaded from --init-from, such as model,optimizer.",
            show_default="all models",
        ),
    ] = "",
    init_partial: Annotated[
        bool,
        _initial(
            "--init-partial", help="Load the tensors of --init-from that fit the model, and list those that do not."
        ),
    ] = False,
    nnodes: Annotated[int, _nodes(help="Number of nodes; give the same command on each.")] = 1,
    node_rank: Annotated[int, _nodes(help="Number of this node, counted from 0.")] = 0,
    rendezvous: Annotated[
        str | None,
        _nodes(
            help="host:port of the first node, at which all nodes connect. Let only these nodes reach the port: any machine "
            "that reaches it can run code in the run."
        ),
    ] = None,
    min_nodes: Annotated[
        int | None,
        _nodes(
            help="Fewest nodes that continue when other nodes are lost. At the start, all nodes must come.",
            show_default="half of all nodes",
        ),
    ] = None,
    lost_after: Annotated[float, _nodes(help="Seconds of silence after which a node counts as lost.")] = 15.0,
    inject: Annotated[
        list[str] | None,
        _injection(
            metavar="SPEC",
            help="Break something on purpose, as KIND@STEP[:POINT][,rank=RANKS]: kill@120, or "
            "hang@50+110:backward=0.5,rank=1+3. May be repeated. Kinds: exit, kill, hang, slow, flip, io-error, enospc, delay, "
            "torn-write, bit-flip, lost-rename. Points: boundary, forward, backward=F (the fraction F of the gradients is "
            "summed), optimizer, save, recovery; of faults of the storage: the file tensors, extra, manifest or latest of a "
            "snapshot, or the removal of one; of a flip: weight, moment, or weight=30 to say which bit.",
        ),
    ] = None,
) -> None:
    """Train SCRIPT to its end, and recover from failures on the way. Example: holdfast run --workers 4 train.py -- --epochs 3"""
    from holdfast.supervise import start_up
    from holdfast.supervise.stop_signals import stop_signals

    _fill_standard_files()
    folder = out or Path("runs") / (script.rpartition(".")[2] if module else Path(script).stem)
    with stop_signals.listening():  # before torch is imported, which takes seconds: a signal then is not a crash
        from holdfast.advice.question import size_of
        from holdfast.faults.spec import parse_training
        from holdfast.runs.config import RunConfig, WeightsSource

        source = None
        if init_from is not None:
            place = str(Path(init_from).resolve())
            source = WeightsSource(place=place, take=_split(init_names), partial=init_partial)
        elif init_names or init_partial:
            raise BadInput("--init-names and --init-partial need --init-from: say what to load.")
        config = RunConfig(
            script=script,
            module=module,
            args=tuple(args or ()),
            workers=workers,
            recovery=recovery,
            spares=spares,
            workers_after=_counts(workers_after),
            save_every=save_every,
            writer=writer,
            keep_last=keep_last,
            save_bandwidth=int(size_of(save_bandwidth, "--save-bandwidth")) if save_bandwidth else None,
            max_restarts=max_restarts,
            seed=seed,
            failures=parse_training(inject or ()),
            hang_timeout=hang_timeout,
            replace_slow=replace_slow,
            witness_every=witness_every,
            checkpoints=checkpoints,
            source=source,
            extend=extend,
        )
        config.check_world(nnodes)  # before the supervisor is imported, which needs torch
        with start_up.importing_torch():
            from holdfast.supervise.supervisor import supervise

        verdict = supervise(
            config,
            folder,
            nnodes=nnodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
            min_nodes=min_nodes,
            lost_after=lost_after,
            preload=None if preload is None else [name for name in _split(preload) if name != "none"],
            may_change=_split(may_change),
        )
        is_complete = verdict.verdict == "completed"
        audit = final_audit(folder, config, nnodes, complain) if is_complete else FinalAudit((), verdict.exit_code)
        stop_signals.ignore()
    _end(verdict, folder, audit)


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _counts(text: str) -> tuple[int, ...]:
    names = _split(text)
    if not all(name.isdecimal() and int(name) for name in names):
        raise BadInput(f"--workers-after {text} is not a list of numbers of workers, 1 or more: write it as 4,2,3.")
    return tuple(map(int, names))


def _fill_standard_files() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed, so that no other file gets its descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - open to the end


def _end(verdict: "RunVerdict", folder: Path, audit: FinalAudit) -> NoReturn:
    lines = (printable(line) for line in (verdict.line, *audit.lines, f"run: {folder}"))
    texts = ("".join(f"{line}\n" for line in lines), "")
    for number, (stream, text) in enumerate(zip((sys.stdout, sys.stderr), texts, strict=True), 1):
        try:
            stream.write(text)
            stream.flush()
        except OSError:  # a closed pipe, a full disk; Python would try again at exit, and change the status
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    raise typer.Exit(audit.exit_code)
