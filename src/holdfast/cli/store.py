"""`holdfast inspect` and `holdfast verify`: list and check the contents of a checkpoint store."""

from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.console import cell, meter, say, size
from holdfast.printable import printable

PLACE = "The folder of a run, or a checkpoint store: a directory or a URL such as s3://bucket/run."


def inspect(place: Annotated[str, typer.Argument(metavar="RUN|STORE", help=PLACE)]) -> None:
    """List the snapshots in a checkpoint store. No tensor is read. Example: holdfast inspect runs/a"""
    from holdfast.checkpoint.scrub import inspect as contents_of
    from holdfast.weights.locate import store_of

    contents = contents_of(store_of(place))
    table = Table("snapshot", "epoch", "cursor", "workers", "size", "largest file", "saved", box=None)
    for manifest in contents.snapshots:
        saved = datetime.fromtimestamp(manifest.saved).astimezone().isoformat(" ", "seconds")
        largest = size(max(shard.length for shard in manifest.shards))  # of the files of all workers
        at = f"step {manifest.step}", manifest.epoch, manifest.cursor
        table.add_row(*map(cell, (*at, manifest.world, size(manifest.bytes), largest, saved)))
    if contents.snapshots:
        Console().print(table)
    if running := contents.running:
        ages = f"saved at iterations {running.oldest} to {running.newest}"
        say(f"running checkpoint: {running.blocks} blocks, {ages}, {size(running.bytes)}")
    for name in contents.set_aside:
        say(f"set aside: {printable(name)}: a run could not use it and continued without it; you may remove it")
    for bad in contents.unreadable:
        say(f"unreadable: {printable(bad.name)}: {printable(bad.why)}")
    raise typer.Exit(1 if contents.unreadable else 0)


def verify(place: Annotated[str, typer.Argument(metavar="RUN|STORE", help=PLACE)]) -> None:
    """Verify every byte in a checkpoint store. The exit status is 1 if something is damaged. Example: holdfast verify runs/a"""
    from holdfast.checkpoint import scrub
    from holdfast.finding import counted
    from holdfast.weights.locate import missing_commit_of, store_of

    opened = store_of(place)
    with meter() as begin:
        count = scrub.records(opened)
        findings = scrub.verify(opened, begin("verify", count))
    lost = missing_commit_of(place)
    for bad in findings:
        say(f"bad: {printable(bad.name)}: {printable(bad.why)}")
    if lost:
        say(f"missing: the snapshot of step {lost}, the last one that the run committed")
    if not findings and not lost:
        say(f"all good: {counted(count, 'save')}, every byte as it was committed")
    raise typer.Exit(1 if findings or lost else 0)
