"""The audit check of silent data corruption: all ranks had equal states, and what a flipped bit has changed was undone."""

from collections import defaultdict
from collections.abc import Mapping

from holdfast.audit.rank_session import RankSession
from holdfast.audit.run_record import RunRecord
from holdfast.events import Corruption, Witnessed
from holdfast.finding import Verdict, counted


def no_corruption_remains(record: RunRecord) -> tuple[Verdict, str] | None:
    """Check that the recorded digests of all ranks agree, and that each corruption led to a restart from before it.

    Return None if no digests had to be compared, as in a run without `--witness-every`."""
    compared = _witnesses(record)
    for (attempt, step), witnesses in compared.items():
        if error := _disagreement(witnesses, record.world(attempt)):
            return "fail", f"{error} before {record.step_name(step)} of attempt {attempt}, and the run did not notice"
    undone: list[str] = []
    for attempt, corruption in record.corruptions.items():
        restored = _restored_after(record, attempt)
        if restored is None:
            return "unknown", f"{_described(corruption)}, and no later attempt has undone it"
        last = -1 if corruption.agreed is None else corruption.agreed
        if restored > last:
            return "fail", f"{_described(corruption)}, but the run continued from step {restored}, which may be wrong"
        undone.append(f"{_described(corruption)}{_hindsight(corruption, compared)}, and was undone")
    if lacking := _without_comparison(record):
        return "unknown", lacking
    if not compared and not undone:
        return None
    steps = counted(len({step for _, step in compared}), "step")
    return "pass", "; ".join([f"all ranks agreed on the whole state before {steps}", *undone])


def _without_comparison(record: RunRecord) -> str | None:
    """Return a message on the first worker process that compared its state and recorded no comparison, or None."""
    for attempt in record.trained:
        sessions = () if attempt in record.corruptions else record.attempts[attempt]
        if silent := next((session for session in sessions if _must_have_compared(session)), None):
            every = silent.plan.witness_every if silent.plan else None
            return (
                f"{silent.who} trained attempt {attempt} with --witness-every {every}, but has no record of a comparison. "
                "Either lines of history/ are missing, or the states were not compared: then the logs have a warning"
            )
    return None


def _must_have_compared(session: RankSession) -> bool:
    """Return True if `session` has no record of a comparison, although its first one has ended.

    A worker process compares its state before its first step. It waits for the result before it begins the next
    comparison, or ends. If members were lost, the comparison may have been interrupted."""
    every = session.plan.witness_every if session.plan else None
    if not every or session.witnesses or not len(session.steps):
        return False
    next_comparison = (session.first_step // every + 1) * every
    return bool(session.end) or (not session.regroups and session.reached > next_comparison)


def _witnesses(record: RunRecord) -> dict[tuple[int, int], dict[int, Witnessed]]:
    """Return the witnesses of each attempt and step, by rank."""
    compared: defaultdict[tuple[int, int], dict[int, Witnessed]] = defaultdict(dict)
    for attempt, sessions in record.attempts.items():
        for session in sessions:
            for witness in session.witnesses:
                compared[attempt, witness.step][session.rank] = witness
    return compared


def _disagreement(witnesses: Mapping[int, Witnessed], size: int) -> str | None:
    firsts: dict[int, int] = {}
    for rank, witness in witnesses.items():
        first = firsts.setdefault(witness.group, rank)
        if witness.digest != witnesses[first].digest:
            return f"rank-{first} and rank-{rank} had different states"
        keeper = (rank + witness.apart) % size
        if witness.copy is not None and keeper in witnesses and witnesses[keeper].copy != witness.digest:
            return f"the shard of rank-{rank} and its copy on rank-{keeper} differed"
    return None


def _restored_after(record: RunRecord, attempt: int) -> int | None:
    """Return the step that the attempt after `attempt` restored, -1 if it began again at step 0, or None if there is none."""
    for later, sessions in record.attempts.items():
        restored = [s.recover.restored for s in sessions if s.recover and not record.has_joined(s)]
        if later > attempt and restored:
            return max(-1 if step is None else step for step in restored)
    return None


def _described(corruption: Corruption) -> str:
    return f"{corruption.because} before step {corruption.step} of attempt {corruption.attempt}"


def _hindsight(corruption: Corruption, compared: Mapping[tuple[int, int], Mapping[int, Witnessed]]) -> str:
    """Return which of two copies was wrong, by the states of the same step when it was repeated; "" if that is unknown."""
    again = [w for (attempt, step), w in compared.items() if attempt > corruption.attempt and step == corruption.step]
    size = len(corruption.digests)
    if corruption.culprit is not None or not corruption.copies or not again:
        return ""
    for rank, digest in enumerate(corruption.digests):
        keeper = (rank + corruption.apart) % size
        if digest != corruption.copies[keeper] and rank in again[0]:
            wrong = f"the copy on rank {keeper}" if again[0][rank].digest == digest else f"the shard of rank {rank}"
            return f" ({wrong} was wrong: the repeated steps gave another)"
    return ""
