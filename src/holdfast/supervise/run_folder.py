"""The folder of a run: checks which run is in the folder, and whether a command continues this run.

A run is identified by its script, the script's arguments, its seed, its recovery strategy and its initial weights.
Arguments may change if the user names them (--may-change) or extends the run (--extend). A folder in which nothing was
trained yet can be used for another run.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from holdfast.atomic_write import write_atomically
from holdfast.checkpoint import manifest
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import BadInput, StorageFailed
from holdfast.events import Judged
from holdfast.history.log import recall
from holdfast.history.tail import has_trained, last_continued
from holdfast.runs import lock
from holdfast.runs.arguments import changes, name_all, plain
from holdfast.runs.config import IDENTITY, RunConfig, read_config


@contextmanager
def claimed(
    out: Path, config: RunConfig, node: int = 0, *, may_change: Sequence[str] = (), has_saved: bool = True
) -> Iterator[None]:
    """Lock the folder `out` during the `with` block and write `config` to it; raise BadInput if it holds another run.

    Script arguments in `may_change` may differ. Another run that has trained nothing is replaced, unless another node
    uses the folder now. `has_saved` is False if the place of `config.checkpoints` holds nothing of a run. If no rank
    continues the run within the block, because the command is refused, the earlier settings are put back."""
    with lock.hold(out, node):
        path, earlier = out / "run.json", None
        try:
            if path.exists():
                theirs = read_config(out)
                is_empty = theirs.checkpoints is None or (theirs.checkpoints == config.checkpoints and not has_saved)
                is_free = is_empty and not lock.others_hold(out, node)
                if differing(config, theirs) and not (is_free and _clear_untrained(out)):
                    _check_same_run(out, config, theirs, may_change)
                    earlier = theirs
            elif any(entry for entry in out.iterdir() if not entry.name.startswith(".")):
                raise BadInput(f"{out} is not empty and holds no run: name another --out.")
            continued = last_continued(out / "history") if earlier else None
            _write(out, config, node)
        except OSError as error:
            why = error.strerror or error
            raise StorageFailed(f"cannot use {out} for a run: {why}. Name another --out.") from error
        try:
            yield
        finally:
            if earlier and last_continued(out / "history") == continued:
                _write(out, earlier, node)


def _write(out: Path, config: RunConfig, node: int) -> None:
    text = json.dumps(config.to_json(), indent=2) + "\n"
    write_atomically(out / "run.json", text.encode(), out / f".run-{node}.tmp", durable=True)


def differing(mine: RunConfig, theirs: RunConfig) -> list[str]:
    """Return the names of settings that differ, among those that identify a run; empty if both are of the same run."""
    return [name for name in IDENTITY if getattr(mine, name) != getattr(theirs, name)]


def with_seed_of(out: Path, config: RunConfig) -> RunConfig:
    """Return `config` with the seed of the run in `out`, if `config` has none and that run has trained a step."""
    if config.seed is not None or not (out / "run.json").exists() or not has_trained(out / "history"):
        return config
    return replace(config, seed=read_config(out).seed)


def _check_same_run(out: Path, mine: RunConfig, theirs: RunConfig, may_change: Sequence[str]) -> None:
    fields = [name for name in differing(mine, theirs) if name != "args"]
    different = [f"{name} was {_shown(theirs, name)}, not {_shown(mine, name)}" for name in fields]
    allowed = {plain(name) for name in may_change}
    refused = [change for change in changes(theirs.args, mine.args) if plain(change.name) not in allowed]
    refused = [change for change in refused if not (mine.extend and change.lengthens)]
    if not different and not refused and mine.args != theirs.args and not changes(theirs.args, mine.args):
        different = ["its arguments come in another order"]
    if not (different or refused):
        return
    advice = "name another --out, or give the same command"
    if any(change.shortens for change in refused):
        advice += ". A run can be made longer but not shorter"
    elif refused:
        names = ",".join(plain(change.name) for change in refused)
        advice += f". If it is the same run: --may-change {names}"
        advice += ", or --extend to train it for longer" if all(change.lengthens for change in refused) else ""
    if refused:
        different.append(f"the script's {name_all(refused)}")
    raise BadInput(f"{out} holds another run ({'; '.join(different)}): {advice}.")


def _clear_untrained(out: Path) -> bool:
    history, checkpoints = out / "history", DirectoryStore(out / "checkpoints")
    verdicts = [event.what for file in history.glob("supervisor*.jsonl") for event in recall(file, "verdict")]
    ended = any(isinstance(what, Judged) and what.verdict in ("completed", "preempted") for what in verdicts)
    if ended or has_trained(history) or any(manifest.steps(checkpoints)):
        return False
    for step in manifest.steps(checkpoints):
        manifest.remove(checkpoints, step)  # first weights, made with other arguments
    if history.exists():
        taken = [int(path.name.rpartition("-")[2]) for path in out.glob("history-before-[0-9]*")]
        history.rename(out / f"history-before-{max(taken, default=0) + 1}")
    return True


def _shown(config: RunConfig, name: str) -> str:
    value = getattr(config, name)
    return "not given" if value is None else repr(value)
