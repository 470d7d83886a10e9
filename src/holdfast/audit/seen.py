"""What supervisors saw of the attempts of a run: which attempt each means by a number, and who failed in it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from holdfast.audit.ledger import Ledger
from holdfast.audit.supervision import Supervision
from holdfast.events import Detect


def meant(ledger: Ledger, supervision: Supervision, number: int) -> Sequence[int]:
    """The attempts of ranks that a supervisor may mean by a number.

    A supervisor that was killed before it could write down a start is behind in its count ever after: not before that,
    and at last by as much as ranks tell of more attempts.
    """
    behind = max(0, max(ledger.attempts, default=0) - max(last_start(ledger), number))
    lives = [each for each in ledger.supervisions if each.who == supervision.who]
    place = next(i for i, each in enumerate(lives) if each is supervision)
    least = behind if supervision is lives[-1] and supervision.verdicts else 0
    most = behind if least or any(not each.verdicts for each in lives[:place]) else 0
    return range(number + least, number + most + 1)


def last_start(ledger: Ledger) -> int:
    """The number of the last attempt that a supervisor tells that it started."""
    return max((number for each in ledger.supervisions for number in each.launches), default=0)


def counts_alike(ledger: Ledger) -> bool:
    """Whether no supervisor can have been killed before it wrote down a start: then it and the ranks count alike."""
    told = all(each.verdicts for each in ledger.supervisions[:-1])
    return told and last_start(ledger) >= max(ledger.attempts, default=0)


def fatal(ledger: Ledger, supervision: Supervision, counted: int, number: int) -> Counter[int]:
    """Who failed in an attempt, as its supervisor counts it, and how often the others, as they do, did not go on."""
    return Counter(supervision.failed.get(counted, ())) - survived(ledger, number)


def survived(ledger: Ledger, number: int) -> Counter[int]:
    """How often others went on without each rank of an attempt."""
    return next((each.survived for each in ledger.live if each.number == number), Counter())


def placed(ledger: Ledger) -> Iterator[tuple[Supervision, Detect, int]]:
    """Every failure of which a supervisor says in which step a rank was, and the one attempt of ranks that it means."""
    for supervision in ledger.supervisions:
        for detect in supervision.detects:
            several = meant(ledger, supervision, detect.attempt)
            if detect.rank >= 0 and detect.step is not None and len(several) == 1:
                yield supervision, detect, several[0]
