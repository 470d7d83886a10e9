"""`holdfast rehearse`: prove that a script resumes exactly."""

import random
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.console import Module, Script, say
from holdfast.errors import BadInput
from holdfast.printable import printable


def rehearse(
    script: Script,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of SCRIPT, after --.")] = None,
    module: Module = False,
    steps: Annotated[
        int | None, typer.Option(help="Steps to train.  [default: two epochs and a half, at most 100 steps]")
    ] = None,
    inject: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="Kills at random steps, such as random=3,seed=7, in addition to kills at saves and at ends of epochs. "
            "Without a seed, the command draws a seed and prints it.",
        ),
    ] = "random=3",
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 1,
    recovery: Annotated[
        str, typer.Option(help="How the run recovers from the kills: restart, or replay with 2 workers or more.")
    ] = "restart",
    seed: Annotated[int, typer.Option(help="Seed of the sample order and of all random numbers.")] = 0,
    preload: Annotated[str, typer.Option(help="Modules to import once, before workers start.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Keep the runs in this folder, which must be new.  [default: a temporary one]")
    ] = None,
) -> None:
    """Test that SCRIPT resumes exactly: run it twice without kills and once with kills, and compare every bit of its state.
    Example: holdfast rehearse train.py -- --epochs 3"""
    from holdfast.faults.spec import parse_rehearsal
    from holdfast.supervise.stop_signals import stop_signals

    kills = parse_rehearsal(inject)
    seed_of_kills = random.SystemRandom().randrange(1 << 16) if kills.seed is None else kills.seed
    if steps is not None and steps < 2:
        raise BadInput(f"no kill fits into {steps} steps: give 2 or more.")
    if out is not None and out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty: name another --out.")
    with stop_signals.listening(), tempfile.TemporaryDirectory(prefix="holdfast-rehearsal-") as temporary:
        from holdfast.rehearse import rehearsal
        from holdfast.rehearse.report import lines
        from holdfast.runs.config import RunConfig
        from holdfast.supervise.preload import script_file

        config = RunConfig(
            script=script, module=module, args=tuple(args or ()), workers=workers, recovery=recovery, seed=seed
        )
        script_file(config)  # before torch is imported, which takes seconds
        _print_line(f"random kills: --inject random={kills.count},seed={seed_of_kills}")
        modules = tuple(name for name in preload.split(",") if name)
        folder = out or Path(temporary)
        rehearsed = rehearsal.rehearse(
            config,
            folder,
            steps=steps,
            at_random=kills.count,
            seed=seed_of_kills,
            preload=modules,
            print_line=_print_line,
        )
        for line in lines(rehearsed):
            say(line)
    if out:
        say(f"runs: {out}")
    raise typer.Exit(0 if rehearsed.cause is None else 1)


def _print_line(line: str) -> None:
    Console(stderr=True).print(printable(f"holdfast: {line}"), markup=False, highlight=False, soft_wrap=True)
