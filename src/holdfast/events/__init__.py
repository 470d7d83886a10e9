"""The events of a history: a class for each kind, how it is written as JSON, and how it is read back.

These files define the format of a history. A line is one JSON object: `event` names the kind, `time` and `who` say when
and by whom it was written, and the other fields are those of the kind's class. A field is left out if it has its
default value. Readers keep events of unknown kinds (`Other`) and events with wrong fields (`Malformed`), so every line
of an intact file is an event. The version rises when a field changes its meaning or a new one is required.
"""

from holdfast.events.any_run import JSON, VERSION, Commit, Done, Malformed, Open, Other
from holdfast.events.fields import KINDS, What
from holdfast.events.lines import Event, from_json, line, parse, to_json
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
    SECOND_SIGNAL,
    SUPERVISED_ONLY,
    Attempt,
    Detect,
    Judged,
    Launch,
    Order,
    Plan,
    Preempt,
    Preempted,
    Recover,
    Regroup,
    Restart,
    Save,
    Scale,
    Seconds,
    Step,
    Stopped,
    Strike,
)

__all__ = [
    "JSON",
    "KINDS",
    "SECOND_SIGNAL",
    "SUPERVISED_ONLY",
    "VERSION",
    "Applied",
    "Attempt",
    "Chosen",
    "Commit",
    "Detect",
    "Done",
    "Dropped",
    "Event",
    "Iterate",
    "Joined",
    "Judged",
    "Launch",
    "Lost",
    "Malformed",
    "Moved",
    "Open",
    "Order",
    "Other",
    "Plan",
    "Preempt",
    "Preempted",
    "Pushed",
    "Recover",
    "Regroup",
    "Restart",
    "Restored",
    "Save",
    "Scale",
    "Seconds",
    "Serve",
    "Step",
    "Stopped",
    "Strike",
    "Struck",
    "What",
    "from_json",
    "line",
    "parse",
    "to_json",
]
