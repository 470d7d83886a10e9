"""Whether a run began with the weights that it was to begin with, on all ranks, and only where nothing came back."""

from holdfast.audit.ledger import Ledger


def other_beginning(ledger: Ledger) -> str | None:
    """Who began with other weights than the others, than the supervisors or run.json tell; or took some in the middle."""
    told = [] if ledger.argv is None else [("the run in run.json", ledger.weights)]
    told += [(each.who, each.weights) for each in ledger.supervisions if each.launches]
    for lives in ledger.attempts.values():
        for life in lives:
            recover = life.recover
            if recover is None or life.arrival is not None:  # who joins has its state from the others
                continue
            if recover.restored is not None:
                if recover.weights is not None:
                    return f"{life.who} took first weights in attempt {life.number}, after step {recover.restored} came back"
                continue
            told.append((f"{life.who} in attempt {life.number}", recover.weights))
    for who, weights in told[1:]:
        if weights != told[0][1]:
            return f"{told[0][0]} began with {_shown(told[0][1])}, and {who} with {_shown(weights)}"
    return None


def beginning(ledger: Ledger) -> str:
    """What a run began with, if not with weights that its script drew, as a part of a sentence."""
    for each in ledger.supervisions:
        if each.weights:
            return f"; began with {_shown(each.weights)}" + (f" of {each.source}" if each.source else "")
    return ""


def _shown(weights: str | None) -> str:
    return "weights of its own" if weights is None else f"the weights {weights[:12]}"
