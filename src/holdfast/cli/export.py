"""`holdfast export`: write the weights of a run to a file that other programs read."""

from typing import Annotated

import typer

from holdfast.cli.console import complain, say
from holdfast.errors import BadInput


def export(
    place: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or a checkpoint store.")],
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO", help="model.safetensors, model.pt (for weights_only=True), or folder/ (for torch's DCP)."
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="Step of the snapshot to export.  [default: the newest verified one]")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Name passed to run.protect() to export.  [default: the model]")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Export everything passed to run.protect(), for example the optimizer too.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite TO if it exists.")] = False,
) -> None:
    """Export the weights of a RUN under your model's own keys. Example: holdfast export runs/a model.safetensors"""
    from holdfast.weights.export import export, writer_for
    from holdfast.weights.load import load_states
    from holdfast.weights.locate import missing_commit_of

    if only and everything:
        raise BadInput("--only and --all cannot be combined: give one of them.")
    writer_for(to)  # refuses an unknown format before the snapshot is read
    loaded = load_states(place, step)
    for bad in loaded.passed_over:
        say(f"passed over {bad.name}: {bad.why}")
    if step is None and (lost := missing_commit_of(place)):
        complain(
            f"the snapshot of step {lost} was committed but is gone: this is the newest one left, of step {loaded.step}."
        )
    if not only and not everything and len(loaded.models) != 1:
        many = f"{len(loaded.models)} models" if loaded.models else "no model"
        raise BadInput(f"this run protects {many}: give --only with one of {', '.join(loaded.states)}, or --all.")
    name = " and ".join(loaded.states) if everything else only or loaded.models[0]
    export(dict(loaded.states) if everything else loaded.state(name), to, force=force)
    say(f"exported {name} of step {loaded.step} to {to}")
