"""From the folder of a run to an advice: what `holdfast advise` and `run.advise()` call."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.advice.advice import Advice, advise
from holdfast.advice.question import Question, seconds_of
from holdfast.errors import BadInput
from holdfast.events import Event
from holdfast.history.log import read_history
from holdfast.server.advice import ServedAdvice, advise_served
from holdfast.server.cost import is_served

if TYPE_CHECKING:
    from holdfast.train.state.attempt import Recorder

Given: TypeAlias = Advice | ServedAdvice


def advice_on(history: Sequence[Event], question: Question | None = None) -> Given:
    """The advice that a history gives, of a training run or a served one."""
    if not history:
        raise BadInput("there is nothing in this history: name the folder of a run.")
    return advise_served(history, question) if is_served(history) else advise(history, question)


def advise_so_far(record: "Recorder", folder: Path | None, **asked: Any) -> Advice:
    """The advice that a training run's own history gives while it goes on.

    `asked` is what a `Question` takes, times as seconds or as text.
    """
    if folder is None:
        raise BadInput("this run writes no history: start it with `holdfast run`, or give attach(out=...) a folder.")
    record.flush()
    seconds: dict[str, Any] = {
        name: seconds_of(each, name) if isinstance(each, str) else each for name, each in asked.items()
    }
    return advise(read_history(folder).events, Question(**seconds))
