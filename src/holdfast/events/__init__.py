"""The events of a history: a class for each kind, how it is written as JSON, and how it is read back.

These files define the format of a history. A line is one JSON object: `event` names the kind, `time` and `who` say when
and by whom it was written, and the other fields are those of the kind's class. A field is left out if it has its
default value. Readers keep events of unknown kinds (`Other`) and events with wrong fields (`Malformed`), so every line
of an intact file is an event. The version rises when a field changes its meaning or a new one is required.
"""

# ruff: noqa: I001 - `X as X` exports a name; isort would give each of them a statement of its own

from holdfast.events.any_run import (
    JSON as JSON,
    VERSION as VERSION,
    Commit as Commit,
    Done as Done,
    Malformed as Malformed,
    Open as Open,
    Other as Other,
)
from holdfast.events.fields import KINDS as KINDS, What as What
from holdfast.events.lines import (
    Event as Event,
    from_json as from_json,
    line as line,
    parse as parse,
    rank_of as rank_of,
    to_json as to_json,
)
from holdfast.events.server_run import (
    Applied as Applied,
    Chosen as Chosen,
    Dropped as Dropped,
    Iterate as Iterate,
    Joined as Joined,
    Lost as Lost,
    Moved as Moved,
    Pushed as Pushed,
    Restored as Restored,
    Serve as Serve,
    Struck as Struck,
)
from holdfast.events.training_run import (
    SECOND_SIGNAL as SECOND_SIGNAL,
    SUPERVISED_ONLY as SUPERVISED_ONLY,
    Attempt as Attempt,
    Detect as Detect,
    Judged as Judged,
    Launch as Launch,
    Order as Order,
    Plan as Plan,
    Preempt as Preempt,
    Preempted as Preempted,
    Recover as Recover,
    Regroup as Regroup,
    Restart as Restart,
    Save as Save,
    Scale as Scale,
    Seconds as Seconds,
    Step as Step,
    Stopped as Stopped,
    Strike as Strike,
)
