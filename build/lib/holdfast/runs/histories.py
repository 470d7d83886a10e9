"""Finds the history files of a run: in its folder, in the folders of other nodes, and in its checkpoint store."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import BadInput, HoldfastError
from holdfast.history.log import Where
from holdfast.runs.config import RUN, RunConfig, read_config

if TYPE_CHECKING:
    from holdfast.checkpoint.store import Store


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The settings in run.json that an audit compares with the history files."""

    recovery: str | None = None
    weights: str | None = None  # the digest of the initial weights, if they are not those of the script


class RunHistory(NamedTuple):
    """The history files of a run, and its settings from run.json, if that file exists."""

    files: list[Path]
    config: RunConfig | None

    @property
    def facts(self) -> RunFacts | None:
        """The settings that an audit compares with the history files; None without run.json."""
        return RunFacts(self.config.recovery, self.config.weights) if self.config else None


@contextmanager
def open_history(path: Path, node_folders: Sequence[Path] = ()) -> Iterator[RunHistory]:
    """Yield the history files of all nodes of the run in `path`, and its settings.

    If `node_folders` is empty, the history files of other nodes are downloaded from the checkpoint store."""
    from holdfast.history.gather import gather_files

    folders = [path, *node_folders]
    configs = [read_config(folder) for folder in folders if (folder / RUN).exists()]
    # As nodes compare each other when they meet: the script may lie elsewhere.
    if len({(Path(config.script).name, config.args, config.seed, config.recovery) for config in configs}) > 1:
        raise BadInput("these folders belong to different runs: name those of the nodes of one run.")
    config = configs[0] if configs else None
    store: Store | None = None
    if config and config.checkpoints and not node_folders:
        from holdfast.checkpoint.place import open_store

        try:
            store = open_store(config.checkpoints)
            store.names("histories/")
        except HoldfastError as error:
            raise BadInput(
                f"cannot fetch the histories of other nodes: {error}. Name the folders of all nodes with --node-folder, "
                "or audit RUN/history, which is what this node has."
            ) from error
    with gather_files(folders, store) as files:
        yield RunHistory(files, config)


def checkpoints_of(path: Where) -> str | None:
    """Return the path or URL of the checkpoints of the run at `path`, or None if the run has no place for them."""
    for folder in _run_folders(path):
        with suppress(OSError, ValueError):
            data = json.loads((folder / RUN).read_text())
            if isinstance(data, dict) and isinstance(place := data.get("checkpoints"), str):
                return place
        if (folder / "checkpoints").is_dir():
            return str(folder / "checkpoints")
    return None


def _run_folders(path: Where) -> list[Path]:
    paths = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(place) for place in path]
    return list(dict.fromkeys(place.parent.parent if place.suffix == ".jsonl" else place for place in paths))


def read_facts(path: Where) -> RunFacts | None:
    """Return the settings that an audit needs from the first readable run.json in the folders `path`, or None."""
    for folder in _run_folders(path):
        with suppress(OSError, ValueError):
            data = json.loads((folder / RUN).read_text())
            if isinstance(data, dict):
                source = data.get("source")
                recovery, weights = data.get("recovery"), source.get("digest") if isinstance(source, dict) else None
                return RunFacts(
                    recovery if isinstance(recovery, str) else None, weights if isinstance(weights, str) else None
                )
    return None
