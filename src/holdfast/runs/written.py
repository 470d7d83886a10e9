"""What a run writes into its folder, by name: anything else there is somebody's, and is never removed with the run."""

import os
import re
from pathlib import Path

_HISTORY = r"(?:supervisor(?:-\d+)?|rank-\d+|injected-[\w.-]+|controller|node-\d+|worker-\d+)\.jsonl"
_SNAPSHOT = r"(?:step-\d{8,18}|set-aside-\d{8,18}-\d+)/(?:state\.safetensors|extra\.json|manifest\.json)"
_RUNNING = r"running/(?:index-\d{8,18}\.json|segment-\d{8,18}-[\w.-]+\.safetensors)"
_BETWEEN_NODES = r"nodes/term-\d{8}|histories/\w[\w.-]*\.jsonl/[0-9a-f]{16}/\d{8}"
_UNFINISHED = r"(?:\.[0-9a-f]{8}\.tmp)?"
_FILES = re.compile(
    r"run\.json|\.run-\d+\.tmp|\.supervisor-\d+\.lock|scale\.(?:json|partial)|join(?:\.new)?"
    rf"|history(?:-before-\d+)?/{_HISTORY}"
    r"|logs/attempt-\d{4,18}/(?:(?:rank|worker)-\d+\.(?:out|err|error\.json)|ranks\.jsonl)"
    rf"|checkpoints/(?:latest\.json|{_SNAPSHOT}|{_RUNNING}|{_BETWEEN_NODES}|probe-[0-9a-f]{{16}}){_UNFINISHED}"
    r"|tensorboard/events\.out\.tfevents\.[\w.-]+",
    re.ASCII,
)
_FOLDERS = re.compile(
    r"history(?:-before-\d+)?|logs(?:/attempt-\d{4,18})?|tensorboard"
    r"|checkpoints(?:/(?:step-\d{8,18}|set-aside-\d{8,18}-\d+|running|nodes|histories(?:/.*)?))?",
    re.ASCII,
)


def is_history(name: str) -> bool:
    """Whether a file of a history has a name that a run gives."""
    return re.fullmatch(_HISTORY, name, re.ASCII) is not None


def foreign(folder: Path) -> list[str]:
    """What lies in the folder of a run, at any depth, that no run has written; of a folder all that is in it, as one."""
    found = []
    waiting = [""]
    while waiting:
        within = waiting.pop()
        for entry in os.scandir(folder / within):
            name = f"{within}{entry.name}"
            if entry.is_dir(follow_symlinks=False) and _FOLDERS.fullmatch(name):
                waiting.append(f"{name}/")
            elif not (entry.is_file(follow_symlinks=False) and _FILES.fullmatch(name)):
                found.append(name)
    return sorted(found)
