"""The assumptions behind an advice: a sentence for each value that neither the history of the run nor the user gives."""

from collections.abc import Callable, Mapping

from holdfast.advice import estimate as published
from holdfast.advice.estimate import GIVEN, INFERRED, MEASURED, Estimate
from holdfast.advice.live_limits import why_restart
from holdfast.advice.prices import Price, has_larger_state, is_larger, loses_node, restart_time, transfer_time
from holdfast.advice.question import Question, bytes_in_words, in_words
from holdfast.advice.run_costs import RunCosts
from holdfast.advice.shard_costs import shard_costs
from holdfast.advice.shared_storage import reading_time, snapshot_bytes


def assumptions(
    costs: RunCosts, question: Question, mtbf: Estimate, price_of: Mapping[str, Price], best: str, every: int
) -> list[str]:
    """Return a sentence for each value that is assumed, with the option that replaces it.

    `best` is the advised recovery, and `every` the best number of steps between two saves under restart."""
    limit = why_restart(costs, question)
    candidates = [
        limit and limit[0].upper() + limit[1:],
        None if limit or best == "restart" else _gloo(costs, question, best, every),
        _steps_over_gloo(question),
        _lost_nodes(costs, question),
        _as_in_run(costs, question),
        _restart(costs, question),
        None if limit else _larger_state(costs, question),
        None if limit else _live(costs, question, price_of),
        _failure_rate(costs, mtbf),
        None if limit and question.storage is None else _size(costs, question),
        _unused_parameters(costs, question),
        None if limit else _bandwidth(costs, question),
    ]
    return [line for line in candidates if line]


def _gloo(costs: RunCosts, question: Question, best: str, every: int) -> str | None:
    """Return what to choose instead of live recovery if workers communicate over NCCL, which no history records."""
    if question.backend is not None:
        return None
    loss = "a sharded model restarts after every loss" if costs.sharded else "live recovery is untested"
    return (
        f"The backend: {best} is advised for gloo. Over NCCL on several GPUs {loss}; choose --recovery restart --save-every "
        f"{every} there."
    )


def _steps_over_gloo(question: Question) -> str | None:
    if question.backend != "gloo":
        return None
    given = "" if question.step is None else " given"
    return f"A step over gloo takes the{given} time of a step. Gloo is slow on GPUs: give --step as measured over gloo."


def _lost_nodes(costs: RunCosts, question: Question) -> str | None:
    """Return a sentence on what happens to a lost node, and on the time that is not counted."""
    if not loses_node(costs, question):
        return None
    return (
        "A lost node returns. Not counted: the slower steps until then, and up to --lost-after (15 s) to notice a node that "
        "falls silent. If the run must wait for the node (--min-nodes), there is one restart, as long as the wait."
    )


def _as_in_run(costs: RunCosts, question: Question) -> str | None:
    """Return a sentence on the values of the run that are taken for a larger job."""
    values = {
        "--step": (question.step, "a step"),
        "--stall": (question.stall, "the delay by a save"),
        "--storage": (question.storage, "the time until a save is durable"),
    }
    taken = {option: name for option, (value, name) in values.items() if value is None}
    if not taken or not is_larger(costs, question):
        return None
    return f"As with the {costs.workers} workers of this run: {', '.join(taken.values())}. Give {', '.join(taken)} if you know better."


def _restart(costs: RunCosts, question: Question) -> str | None:
    read = (
        "" if question.storage is None else f", with {in_words(reading_time(costs, question).value)} to read a snapshot"
    )
    if question.restart is not None:
        return _read_in_restart(question, reading_time(costs, question).value)
    if (
        costs.restart is not None
        and not is_larger(costs, question)
        and not read
        and not has_larger_state(costs, question)
    ):
        return None
    source = (
        "the restarts of this run" if costs.restart else f"the start of this run, and {published.SOURCES['notice']}"
    )
    time = with_range(restart_time(costs, question))
    return (
        f"The time of a restart: {time} from {source}{read}{_scaled(costs, question)}. Give --restart if you know it."
    )


def _read_in_restart(question: Question, read: float) -> str | None:
    """Return a sentence if the given time of a restart is too short to read a snapshot from the given storage."""
    if question.storage is None or question.restart is None or read <= question.restart:
        return None
    return (
        f"The time of a restart is that of --restart, {in_words(question.restart)}, although reading a snapshot alone takes "
        f"{in_words(read)} at {bytes_in_words(question.storage)}/s: give the whole time."
    )


def _larger_state(costs: RunCosts, question: Question) -> str | None:
    """Return a sentence if a replay is not known, because the state of the job is much larger than that of the run."""
    if question.replay is not None or not has_larger_state(costs, question):
        return None
    run = "unknown" if costs.state_bytes is None else bytes_in_words(costs.state_bytes)
    source = (
        "that of --restart"
        if question.restart is not None
        else f"the start of a worker of this run, and {in_words(transfer_time(costs, question).value)} to receive the state"
    )
    return (
        f"The time of a replacement: {source}, because the state of this run ({run}) is much smaller than that of the job "
        f"({bytes_in_words(snapshot_bytes(costs, question))}). Give --replay if you know it."
    )


def _live(costs: RunCosts, question: Question, price_of: Mapping[str, Price]) -> str | None:
    seen = (GIVEN,) if is_larger(costs, question) else (GIVEN, MEASURED, INFERRED)
    replaced = ("replay", "partial") if has_larger_state(costs, question) else ()  # see _larger_state
    unseen = [
        name
        for name, price in price_of.items()
        if name not in ("restart", *replaced) and price.stands.basis not in seen
    ]
    if not unseen:
        return None
    source = published.SOURCES["regroup"] + (", and the start of a replacement" if "replay" in unseen else "")
    if any(name in costs.live for name in unseen):
        source = "as in the recoveries of this run"
    return f"The time of {' and '.join(unseen)}: {source}{_scaled(costs, question)}."


def _scaled(costs: RunCosts, question: Question) -> str:
    if not is_larger(costs, question):
        return ""
    return ", and longer with more workers, as FT-HSDP reports for O(100K) GPUs (arXiv 2602.00277)"


def _failure_rate(costs: RunCosts, mtbf: Estimate) -> str | None:
    if mtbf.basis in (GIVEN, MEASURED):
        return None
    injected = " (injected failures do not count)" if costs.struck else ""
    return (
        f"The failure rate{injected}: {published.SOURCES['mtbf']}, with one GPU per worker. Give --mtbf if you know it."
    )


def _size(costs: RunCosts, question: Question) -> str | None:
    shards = shard_costs(costs, question)
    if shards and shards.basis == INFERRED:
        return (
            f"The number of parameters: {shards.parameters:.3g}, the size of a snapshot over 12 bytes, as with AdamW in float32. "
            "Give --parameters if the optimizer is another."
        )
    return None


def _unused_parameters(costs: RunCosts, question: Question) -> str | None:
    if question.parameters is None or costs.sharded or question.storage is not None:
        return None
    return "The model of this run is not sharded, so --parameters changes only the time of a replacement without --storage."


def _bandwidth(costs: RunCosts, question: Question) -> str | None:
    shards = shard_costs(costs, question)
    if not shards or question.bandwidth is not None or shards.in_step:
        return None
    return (
        f"The bandwidth from a rank to the next, on which the cost of replay for a sharded model depends: "
        f"{bytes_in_words(shards.bandwidth)}/s. Give --bandwidth if you know it."
    )


def with_range(estimate: Estimate, basis: str = "") -> str:
    """Return seconds as text with their interval and, if given, their `basis`, for example "3 s (2 s to 4 s; given)"."""
    return f"{in_words(estimate.value)}{range_of(estimate, in_words, basis)}"


def range_of(estimate: Estimate, words: Callable[[float], str], basis: str = "") -> str:
    """Return the interval of `estimate` and its `basis` in parentheses, or no text if there is neither."""
    low, high = words(estimate.low), words(estimate.high)
    known = "; ".join(filter(None, ("" if low == high else f"{low} to {high}", basis)))
    return f" ({known})" if known else ""
