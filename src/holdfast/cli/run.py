"""`holdfast run`: train through failures."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from holdfast.cli.console import TRAIN
from holdfast.errors import BadInput

if TYPE_CHECKING:
    from holdfast.runs.config import WeightsSource
    from holdfast.supervise.verdict import RunVerdict

run = typer.Typer()


@run.command("run", rich_help_panel=TRAIN)
def run_script(
    script: Annotated[Path, typer.Argument(help="A Python script that calls holdfast.attach().")],
    args: Annotated[list[str] | None, typer.Argument(help="What the script is given, after --.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.  [default: runs/SCRIPT]")] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Where snapshots go: a directory or s3://bucket/run that all nodes reach.  [default: in OUT]"
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes on this node.")] = 1,
    recovery: Annotated[
        str,
        typer.Option(
            help="What is done after a failure: restart from the last snapshot; or live, in the processes that are left: "
            "replay (the exact step, once a replacement is there), forward (finish the step without the lost), skip "
            "(drop it)."
        ),
    ] = "restart",
    spares: Annotated[
        int, typer.Option(help="More workers that wait, ready to take the place of a lost one (replay, forward, skip).")
    ] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between two snapshots.")] = 50,
    writer: Annotated[str, typer.Option(help="How a save reaches the disk: overlapped or blocking.")] = "overlapped",
    keep_last: Annotated[int, typer.Option(help="Snapshots to keep.")] = 2,
    max_restarts: Annotated[
        int, typer.Option(help="Failures in a row to survive; a newer snapshot starts the count anew.")
    ] = 3,
    hang_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a worker may be suspended, or take for one step, before it is killed and replaced; six times "
            "as long for a start, restore or save.  [default: learned from the run's own steps]"
        ),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Break something on purpose, as KIND@STEP[:POINT][,rank=RANKS]: kill@120, or "
            "hang@50+110:backward=0.5,rank=1+3. May be repeated. Kinds: exit, kill, hang, slow, io-error, enospc, delay, "
            "torn-write, bit-flip, lost-rename. Points: boundary, forward, backward=F (the fraction F of the gradients is "
            "summed), optimizer, save, recovery; of a save: tensors, extra, manifest, latest, removal.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Order of samples and all that is random come from it.  [default: that of attach(seed=...), else of "
            "the script's torch.manual_seed before it, else 0]"
        ),
    ] = None,
    preload: Annotated[
        str | None,
        typer.Option(
            help="Modules to import once, before workers start, such as torchvision; or none.  [default: well-known "
            "heavy libraries that the script imports first]"
        ),
    ] = None,
    extend: Annotated[
        bool,
        typer.Option(
            "--extend", help="Train a run for longer than it was to be: whole numbers that SCRIPT is given may grow."
        ),
    ] = False,
    may_change: Annotated[
        str,
        typer.Option(
            help="Arguments of SCRIPT that may differ from the run's so far, such as log-interval,num-workers."
        ),
    ] = "",
    nnodes: Annotated[int, typer.Option(help="Nodes of the job; give the same command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which of the nodes this is.")] = 0,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            help="Where nodes meet: host:port of the first. Let only these nodes reach it: who does can run code."
        ),
    ] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            help="How many nodes go on, from the last snapshot, when others are lost.  [default: half of them]"
        ),
    ] = None,
    lost_after: Annotated[float, typer.Option(help="Seconds after which a node that says nothing is lost.")] = 15.0,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Begin with the weights of another run's folder, a safetensors file, a torch.save file or a DCP folder.",
        ),
    ] = None,
    take: Annotated[
        str, typer.Option(help="What takes a state from --from, by name, such as model,optimizer.  [default: models]")
    ] = "",
    partial: Annotated[bool, typer.Option(help="Begin with what fits of --from; what does not is named.")] = False,
) -> None:
    """Train SCRIPT until it is done, whatever fails. Example: holdfast run --workers 4 train.py -- --epochs 3"""
    from holdfast.supervise.stop_signals import asked

    _fill_standard_files()
    folder = out or Path("runs") / script.stem
    with asked.listening():  # before torch is imported, which takes seconds: to be asked to stop then is no crash
        from holdfast.faults.spec import parse_training
        from holdfast.runs.config import RunConfig

        config = RunConfig(
            script=str(script),
            args=tuple(args or ()),
            workers=workers,
            recovery=recovery,
            spares=spares,
            save_every=save_every,
            writer=writer,
            keep_last=keep_last,
            max_restarts=max_restarts,
            seed=seed,
            failures=parse_training(inject or ()),
            hang_timeout=hang_timeout,
            checkpoints=checkpoints,
            source=_source(source, take, partial),
            extend=extend,
        )
        config.check_world(nnodes)
        from holdfast.supervise.supervisor import supervise  # it imports torch: what is wrong was said before

        modules = None if preload is None else tuple(name for name in preload.split(",") if name not in ("", "none"))
        verdict = supervise(
            config,
            folder,
            nnodes=nnodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
            min_nodes=min_nodes,
            lost_after=lost_after,
            preload=modules,
            may_change=tuple(name for name in may_change.split(",") if name),
        )
    _end(verdict, folder)


def _source(place: str | None, take: str, partial: bool) -> "WeightsSource | None":
    from holdfast.runs.config import WeightsSource

    if place is None:
        if take or partial:
            raise BadInput("--take and --partial say what is done with --from: give that too.")
        return None
    names = tuple(name.strip() for name in take.split(",") if name.strip())
    return WeightsSource(place=str(Path(place).resolve()), take=names, partial=partial)


def _fill_standard_files() -> None:
    """Whoever starts us without a standard output has us open some other file in its place: then nothing is there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - open to the end


def _end(verdict: "RunVerdict", folder: Path) -> NoReturn:
    """Say how the run ended; the exit status says it too, where nobody reads what we print."""
    texts = (f"{verdict.line}\nrun: {folder}\n", "")
    for number, (stream, text) in enumerate(zip((sys.stdout, sys.stderr), texts, strict=True), 1):
        try:
            stream.write(text)
            stream.flush()
        except OSError:  # a closed pipe, a full disk; Python would try again at exit, and change the status
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    raise typer.Exit(verdict.exit_code)
