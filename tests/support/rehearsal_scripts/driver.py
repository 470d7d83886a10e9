"""Rehearses scripts one after the other in a process that imports torch once, and prints what was found as JSON lines.

Its arguments are a folder, and JSON: by name, what to rehearse and how.
"""

import json
import sys
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.rehearse.rehearsal import rehearse
from holdfast.rehearse.report import lines
from holdfast.runs.config import RunConfig


def found(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """What the rehearsal of one script found."""
    options = {"workers": task.get("workers", 1), "recovery": task.get("recovery", "restart")}
    config = RunConfig(script=task["script"], args=tuple(task.get("args", ())), **options)
    how = {"steps": task.get("steps", 5), "preload": tuple(task.get("preload", ())), "at_random": 0}
    try:
        result = rehearse(config, folder, **how)
    except HoldfastError as error:
        return {"error": str(error)}
    return {"word": result.cause.word if result.cause else None, "lines": list(lines(result))}


if __name__ == "__main__":
    for name, task in json.loads(sys.argv[2]).items():
        print(json.dumps({"name": name, **found(Path(sys.argv[1], name), task)}), flush=True)  # noqa: T201
