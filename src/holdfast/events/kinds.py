"""The registry of events: every kind, and the word that names it in a history."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from holdfast.events.common import Commit, Done, Malformed, Open, Other
from holdfast.events.server_run import (
    Applied,
    Chosen,
    Dropped,
    Iterate,
    Joined,
    Lost,
    Moved,
    Pushed,
    Restored,
    Serve,
    Struck,
)
from holdfast.events.training_run import (
    Attempt,
    Detect,
    Judged,
    Launch,
    Plan,
    Preempt,
    Preempted,
    Recover,
    Regroup,
    Restart,
    Save,
    Scale,
    Step,
    Stopped,
    Strike,
)

What: TypeAlias = (
    Open
    | Attempt
    | Plan
    | Recover
    | Step
    | Save
    | Commit
    | Strike
    | Done
    | Preempted
    | Stopped
    | Regroup
    | Launch
    | Restart
    | Detect
    | Scale
    | Preempt
    | Judged
    | Serve
    | Iterate
    | Pushed
    | Applied
    | Chosen
    | Struck
    | Lost
    | Restored
    | Dropped
    | Joined
    | Moved
    | Other
    | Malformed
)
KINDS: Mapping[str, type[Any]] = {
    "open": Open,
    "attempt": Attempt,
    "plan": Plan,
    "recover": Recover,
    "step": Step,
    "save": Save,
    "commit": Commit,
    "failure": Strike,
    "done": Done,
    "preempted": Preempted,
    "stopped": Stopped,
    "regroup": Regroup,
    "launch": Launch,
    "restart": Restart,
    "detect": Detect,
    "scale": Scale,
    "preempt": Preempt,
    "verdict": Judged,
    "serve": Serve,
    "iterate": Iterate,
    "pushed": Pushed,
    "applied": Applied,
    "chosen": Chosen,
    "struck": Struck,
    "lost": Lost,
    "restored": Restored,
    "dropped": Dropped,
    "joined": Joined,
    "moved": Moved,
}
_WORDS = {kind: word for word, kind in KINDS.items()}


def word(what: What) -> str:
    """The word that names the kind of an event in a history."""
    return what.kind if isinstance(what, Other | Malformed) else _WORDS[type(what)]
