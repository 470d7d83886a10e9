"""The history of a run, wherever its files lie: in its folder, in those of its nodes, in the store of its checkpoints."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint.place import open_store
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, HoldfastError
from holdfast.history.gather import gathered
from holdfast.runs.config import RUN, RunConfig, read_config


@contextmanager
def histories(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """The files of one run's history: those at hand, and of a run's folder also those that its other nodes sent."""
    configs = [read_config(path) for path in _folders(paths)]
    # As nodes compare themselves when they meet: where the script lies may differ.
    if len({(Path(each.script).name, each.args, each.seed, each.recovery) for each in configs}) > 1:
        raise BadInput("these folders are of different runs: name those of one run's nodes.")
    place = configs[0].checkpoints if len(paths) == 1 and configs else None
    with gathered(paths, _sent_to(place) if place else None) as files:
        yield files


def command_of(paths: Sequence[Path]) -> tuple[str, ...] | None:
    """What the run was to execute, as its folder says."""
    for path in _folders(paths):
        config = read_config(path)
        return (config.script, *config.args)
    return None


def weights_of(paths: Sequence[Path]) -> str | None:
    """The digest of what the run was to begin with, as its folder says, if not with weights of its own."""
    return next((read_config(path).weights for path in _folders(paths)), None)


def config_of(path: Path) -> RunConfig | None:
    """How the run in this folder was to be done, if it says so."""
    return read_config(path) if _folders([path]) else None


def _folders(paths: Sequence[Path]) -> list[Path]:
    """Those of the paths that are folders of a run, and not of its history alone."""
    return [path for path in paths if (path / RUN).exists()]


def _sent_to(place: str) -> Store:
    try:
        store = open_store(place)
        store.names("histories/")
    except HoldfastError as error:
        raise BadInput(
            f"no histories of other nodes: {error}. Name the folders of all nodes, or RUN/history for what is here alone."
        ) from error
    return store
