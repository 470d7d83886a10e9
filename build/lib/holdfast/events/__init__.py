"""The events of a history: a class for each kind, how it is written as JSON, and how it is read back.

These files define the format of a history. A line is one JSON object: `event` names the kind, `time` and `who` say when
the event was written and by which process, and the other fields are defined by the class of the kind. A field is left
out if it has its default value. Readers keep events of unknown kinds (`Other`) and events with wrong fields
(`Malformed`), so every line of an intact file is an event. The version rises when a field changes its meaning or a new
field is required.
"""

# ruff: noqa: F403, I001 - every event is exported, and `X as X` exports a name

from holdfast.events.any_run import *
from holdfast.events.fields import KINDS as KINDS, LONGEST as LONGEST, What as What
from holdfast.events.lines import (
    Event as Event,
    from_json as from_json,
    line as line,
    parse as parse,
    rank_of as rank_of,
    step_line as step_line,
    to_json as to_json,
)
from holdfast.events.server_run import *
from holdfast.events.training_run import *
