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
            metavar="TO",
            help="model.safetensors, model.pt (for weights_only=True), or folder/ (for torch's DCP, or see --shard-size).",
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
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Write a Hugging Face model to the folder TO: safetensors files of at most SIZE, such as 5GB, and their index.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite TO if it exists.")] = False,
) -> None:
    """Write the weights of a RUN to a file or folder, with the keys of the model's state_dict. Example: holdfast export runs/a model.safetensors"""
    from holdfast.weights.export import export, writer_for
    from holdfast.weights.load import SavedStates, from_snapshot
    from holdfast.weights.locate import missing_commit_of, store_of

    if only and everything:
        raise BadInput("--only and --all cannot be combined: give one of them.")
    writer_for(to, shard_size)  # refuses an unknown format before the snapshot is read

    def write(saved: SavedStates) -> str:
        name = " and ".join(saved.states) if everything else only or saved.only_model("give --all, or --only with")
        state = dict(saved.states) if everything else saved.state(name)
        export(state, to, force=force, shard_size=shard_size)
        return name

    name, written, passed_over = from_snapshot(store_of(place), step, write)
    for bad in passed_over:
        say(f"passed over {bad.name}: {bad.why}")
    if step is None and (lost := missing_commit_of(place)):
        complain(
            f"the snapshot of step {lost} was committed but is gone: this is the newest one left, of step {written}."
        )
    say(f"exported {name} of step {written} to {to}")
