"""Why a run that was killed came out otherwise: what the workers saw is asked, one question after the other. Pure.

The first question that the observations answer with yes names the cause, and what answered it is the evidence.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from holdfast.rehearse.compare import Divergence, by_step, changed, lost
from holdfast.rehearse.observed import Held, Observed, Window, differing, endings, windows

Word: TypeAlias = Literal[
    "refused",
    "the script failed",
    "not deterministic",
    "not put back",
    "fetched ahead",
    "work after the boundary",
    "a generator of its own",
    "not protected",
    "other data",
    "unknown",
]
SHOWN = 4
LIBRARIES = ("torch's, numpy's and Python's own generators", "restored")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The likely cause in a word, in a sentence, what to do, and what was seen that says so."""

    word: Word
    why: str
    instead: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """All that is known when the cause of a divergence is asked for."""

    found: Divergence
    reference: Sequence[Observed]
    run: Sequence[Observed]
    restless: frozenset[str] = frozenset()  # what differs between runs that were not killed

    @property
    def lost(self) -> dict[str, tuple[Held, Held]]:
        """What the script holds, unprotected, that did not come back."""
        first = self.first
        return lost(by_step(self.reference)[first.step, first.rank], first, self.restless)

    @property
    def first(self) -> Window:
        """The first window of the attempt that came out otherwise."""
        run = self.found.run
        return next(each for each in windows(self.run) if (each.attempt, each.rank) == (run.attempt, run.rank))


def of_a_killed_run(case: Case) -> Cause:
    """Why a run that was killed came out otherwise, though two that were not came out the same."""
    return _first_answer(QUESTIONS, case)


def of_unkilled_runs(case: Case) -> Cause:
    """Why two runs came out differently of which none was killed."""
    return _first_answer(UNKILLED, case)


def _first_answer(questions: Iterable[Callable[[Case], Cause | None]], case: Case) -> Cause:
    answers = (question(case) for question in questions)
    return next(answer for answer in answers if answer)


def _fetched_ahead(case: Case) -> Cause | None:
    """Whether windows are trained after the next one was asked for."""
    idle = [each.step for each in _begins(case.reference) if not each.backwards and not each.stepped]
    late = [each for each in endings(case.reference) if each.backwards or each.stepped]
    works = any(each.backwards for each in windows(case.reference))
    if not (idle and works and late):
        return None
    again = [each.step for each in _begins(case.run) if not each.backwards and each.attempt > 1]
    seen = [
        f"step {idle[0]}, the first, ended without a gradient: its batch was trained after the next was asked for",
        "a batch was trained after the last step had ended",
    ]
    if again:
        seen.append(f"step {again[0]}, the first after a kill, trained nothing either: one batch was left out there")
    return Cause(
        word="fetched ahead",
        why="data fetched across a boundary: the script asks for the next batch before it has trained this one, so a "
        "save in between counts a batch that is not trained yet, and after a kill it never is",
        instead="train each batch before asking for the next; to load ahead, give run.batches(..., workers=2)",
        evidence=tuple(seen),
    )


def _not_put_back(case: Case) -> Cause | None:
    """Whether the protected state was not that of the reference when the first window after the kill began."""
    first = case.first
    wrong = differing(by_step(case.reference)[first.step, first.rank].begun, first.begun)
    if not wrong:
        return None
    return Cause(
        word="not put back",
        why=f"{_listed(wrong)} was not as saved when step {first.step} began: its load_state_dict does not put back what "
        "its state_dict gives, or the script changes it between protect() and the loop",
        instead="call run.protect(...) last before the loop, and have load_state_dict take all that state_dict gives",
        evidence=("it differed when the first batch after the kill was handed out, before anything was trained",),
    )


def _own_generator(case: Case) -> Cause | None:
    """Whether a generator that nobody keys went on from its beginning."""
    found = {path: pair[0] for path, pair in case.lost.items() if pair[0].kind == "generator"}
    if not found:
        return None
    path, held = next(iter(found.items()))
    data = " The batch itself was another." if _other_batch(case) else ""
    return Cause(
        word="a generator of its own",
        why=f"{path} is a {held.type}, a generator that is not torch's, numpy's or Python's own: after the kill it began "
        "anew and draws other numbers",
        instead="draw from torch.rand, np.random or random, which the run keys for every step; or protect it as part of "
        "a class with state_dict and load_state_dict",
        evidence=(f"its state when step {case.first.step} began was not that of the reference.{data}", *_more(found)),
    )


def _unprotected(case: Case, kinds: Sequence[str]) -> Cause | None:
    found = {path: pair for path, pair in case.lost.items() if pair[0].kind in kinds}
    if not found:
        return None
    path, (there, here) = next(iter(found.items()))
    return Cause(
        word="not protected",
        why=f"{path}, {_article(there)}, is not protected: it began anew after the kill",
        instead=_PROTECT[there.kind],
        evidence=(
            f"when step {case.first.step} began it was {_shown(here.mark)}, and {_shown(there.mark)} in the reference",
            *_more({each: pair[0] for each, pair in found.items()}),
        ),
    )


def _thing(case: Case) -> Cause | None:
    """Whether an object with a state of its own was left unprotected."""
    return _unprotected(case, ("scheduler", "optimizer", "buffer"))


def _value(case: Case) -> Cause | None:
    """Whether a variable or a tensor of the script's was left unprotected."""
    return _unprotected(case, ("tensor", "value"))


def _after_the_boundary(case: Case) -> Cause | None:
    """Whether the reference did something at the beginning of the window that the resumed run did not do."""
    its, mine = case.found.reference, case.found.run
    if mine.step != case.found.began:
        return None
    done, again = changed(its.begun, its.midway), changed(mine.begun, mine.midway)
    missing = sorted(done - again)
    if not missing:
        return None
    grouped = "groupby" in mine.holders or "groupby" in its.holders
    who = (
        "itertools.groupby asks for the first batch of the next epoch before the script is done with this one"
        if grouped
        else ("the script asks for the next batch before it is done with this one")
    )
    return Cause(
        word="work after the boundary",
        why=f"work after the boundary: {who}, so what it does then (it changes {_listed(missing)}) is not in the save, "
        "and is not done after the kill",
        instead="write `for epoch in run.epochs(...): for batch in epoch: ...`, with that work after the inner loop; or do "
        "it in the loop, before it asks for the next batch",
        evidence=(
            f"in the reference {_listed(missing)} changed after the batch of step {mine.step} was handed out and before its "
            "first gradient; after the kill it did not",
            *(["the loop runs inside of itertools.groupby"] if grouped else []),
        ),
    )


def _other_data(case: Case) -> Cause | None:
    if not _other_batch(case):
        return None
    its = case.found.reference
    return Cause(
        word="other data",
        why=f"the dataset gave other data for the same samples in step {its.step}: it, or its collate, depends on something "
        "else than the sample's number and the generators of torch, numpy and Python",
        instead="draw from torch.rand, np.random or random, which the run keys for every step, and keep no state between samples",
        evidence=("the sample ids are the same, and the batch is not",),
    )


def _unknown(case: Case) -> Cause:
    return Cause(
        word="unknown",
        why="no cause was found: everything that the script holds, as far as it can be seen from its variables, came back",
        instead="look for state outside of Python variables: files, caches, compiled extensions, other processes",
        evidence=("two runs that were not killed came out the same",) if case.found.is_resumed else (),
    )


def _entropy(case: Case) -> Cause | None:
    """Whether a generator had another state in each of two runs, when the first window began."""
    its, mine = case.found.reference, case.found.run
    found = {
        path: held for path, held in its.held.items() if held.kind == "generator" and _mark(mine, path) != held.mark
    }
    if not found:
        return None
    path, held = next(iter(found.items()))
    return Cause(
        word="a generator of its own",
        why=f"{path} is a {held.type} that is seeded otherwise in every run",
        instead="draw from torch.rand, np.random or random, which the run keys for every step",
        evidence=(f"its state when step {its.step} began differs between two runs of which none was killed",),
    )


def _other_start(case: Case) -> Cause | None:
    its, mine = case.found.reference, case.found.run
    wrong = differing(its.begun, mine.begun)
    if its.step or not wrong:
        return None
    return Cause(
        word="not deterministic",
        why=f"{_listed(wrong)} is not the same when training begins: the first state is made from something that differs "
        "from run to run, or before hf.attach() keys the generators",
        instead="make the model after hf.attach(), and seed what is random",
        evidence=("it differed when the first batch was handed out, before anything was trained",),
    )


def _kernel(case: Case) -> Cause:
    its = case.found.reference
    return Cause(
        word="not deterministic",
        why=f"two runs of which none was killed differ since step {its.step}: a kernel that is not deterministic, or a clock "
        "or another process that the script asks",
        instead="set torch.use_deterministic_algorithms(True), which names such kernels (on CUDA with "
        "CUBLAS_WORKSPACE_CONFIG=:4096:8), and rehearse again",
        evidence=(
            f"when step {its.step} began the protected state, the batch and all generators were the same in both runs; "
            "when it ended they were not",
        ),
    )


QUESTIONS = (
    _fetched_ahead,
    _not_put_back,
    _own_generator,
    _thing,
    _after_the_boundary,
    _value,
    _other_data,
    _unknown,
)
UNKILLED = (_entropy, _other_data, _other_start, _kernel)
_PROTECT = {
    "scheduler": "name it in protect(), as in run.protect(..., scheduler=scheduler)",
    "optimizer": "name it in protect(), as in run.protect(..., optimizer=optimizer)",
    "buffer": "register it with register_buffer(...), persistent, in a module that is protected",
    "tensor": "keep it in something with state_dict and load_state_dict, and name that in protect()",
    "value": "keep it in something with state_dict and load_state_dict, and name that in protect()",
}


def _begins(several: Sequence[Observed]) -> list[Window]:
    """The first window of each attempt of each rank."""
    found: dict[tuple[int, int], Window] = {}
    for each in windows(several):
        found.setdefault((each.attempt, each.rank), each)
    return list(found.values())


def _other_batch(case: Case) -> bool:
    its, mine = case.found.reference, case.found.run
    return its.ids == mine.ids and its.batch != mine.batch


def _mark(window: Window, path: str) -> str | None:
    return window.held[path].mark if path in window.held else None


def _listed(paths: Sequence[str]) -> str:
    rest = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _more(found: dict[str, Held]) -> tuple[str, ...]:
    others = [f"{path} ({each.type})" for path, each in list(found.items())[1:]]
    return (f"so did not: {_listed(others)}",) if others else ()


def _article(held: Held) -> str:
    return {"buffer": "a tensor that the model keeps beside its state_dict"}.get(held.kind, f"a {held.type}")


def _shown(mark: str) -> str:
    return "another" if mark.startswith("tensor ") else mark
