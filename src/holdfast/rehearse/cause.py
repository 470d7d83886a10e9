"""Why a run that was killed came out otherwise: what the workers saw is asked, one question after the other. Pure.

The first question that the observations answer with yes names the cause, and what answered it is the evidence.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from holdfast.rehearse.compare import Divergence, by_step, changed, lost
from holdfast.train.observe.observations import (
    Observed,
    UnprotectedValue,
    Window,
    differing,
    endings,
    is_tensor,
    windows,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The likely cause in a word, in a sentence, what to do, and what was seen that says so."""

    word: Word
    why: str
    instead: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DivergenceCase:
    """All that is known when the cause of a divergence is asked for."""

    found: Divergence
    reference: Sequence[Observed]
    run: Sequence[Observed]
    restless: frozenset[str] = frozenset()  # what differs between runs that were not killed

    @property
    def first(self) -> Window:
        """The first window of the attempt that came out otherwise."""
        run = self.found.run
        return next(each for each in windows(self.run) if (each.attempt, each.rank) == (run.attempt, run.rank))

    @property
    def lost(self) -> dict[str, tuple[UnprotectedValue, UnprotectedValue]]:
        """What the script holds, unprotected, that did not come back: as it was in the reference, and here."""
        its = self.reference_window(self.first.step, self.first.rank)
        return lost(its, self.first, self.restless) if its else {}

    def reference_window(self, step: int, rank: int) -> Window | None:
        """How the reference trained this step."""
        return by_step(self.reference).get((step, rank))

    def is_a_habit(self, path: str) -> bool:
        """Whether the script changes it between the batch and the first gradient in more than half of all windows."""
        later = [each for each in windows(self.reference) if each.step]
        return 2 * sum(path in changed(each.begun, each.midway) for each in later) > len(later)

    def moves(self, path: str) -> bool:
        """Whether something held changed in the window that came out otherwise, or while its batch was loaded."""
        now = self.found.reference
        before = self.reference_window(now.step - 1, now.rank)
        was = before.kept.get(path) if before else now.held.get(path)
        return before is None or was != now.kept.get(path)


def of_a_killed_run(case: DivergenceCase) -> Cause:
    """Why a run that was killed came out otherwise, though two that were not came out the same."""
    return _first_answer(QUESTIONS, case)


def of_unkilled_runs(case: DivergenceCase) -> Cause:
    """Why two runs came out differently of which none was killed."""
    return _first_answer(UNKILLED, case)


def _first_answer(questions: Iterable[Callable[[DivergenceCase], Cause | None]], case: DivergenceCase) -> Cause:
    answers = (question(case) for question in questions)
    return next(answer for answer in answers if answer)


def _fetched_ahead(case: DivergenceCase) -> Cause | None:
    """Whether windows are trained after the next one was asked for: then the first of every attempt trains nothing."""
    start, first = case.reference_window(0, case.first.rank), case.first
    its = case.reference_window(first.step, first.rank)
    if start is None or its is None or start.backwards or first.backwards or not its.backwards:
        return None
    late = any(each.backwards for each in endings(case.reference))
    return Cause(
        word="fetched ahead",
        why="data fetched across a boundary: the script asks for the next batch before it has trained this one, so a "
        "save in between counts a batch that is not trained yet, and after a kill it never is",
        instead="train each batch before asking for the next; to load ahead, give run.batches(..., num_workers=2)",
        evidence=(
            "step 0 ended without a gradient: its batch was trained after the next one was asked for",
            f"so did step {first.step}, the first after the kill, which has one in the reference: a batch was left out",
            *(["a batch was trained after the last step had ended"] if late else []),
        ),
    )


def _not_put_back(case: DivergenceCase) -> Cause | None:
    """Whether the protected state was not the saved one, which is rank 0's, when the first window after the kill began."""
    saved = case.reference_window(case.first.step, 0)
    wrong = differing(saved.begun, case.first.begun) if saved else []
    if not wrong:
        return None
    return Cause(
        word="not put back",
        why=f"{_listed(wrong)} was not as saved when step {case.first.step} began: its load_state_dict does not put back "
        "what its state_dict gave, or the script changes it between protect() and the loop",
        instead="call run.protect(...) last before the loop, and have load_state_dict take all that state_dict gives",
        evidence=("it differed when the first batch after the kill was handed out, before anything was trained",),
    )


def _own_generator(case: DivergenceCase) -> Cause | None:
    """Whether a generator that nobody keys went on from its beginning, and was drawn from."""
    found = {path: pair[0] for path, pair in case.lost.items() if pair[0].kind == "generator" and case.moves(path)}
    if not found:
        return None
    path, held = next(iter(found.items()))
    return Cause(
        word="a generator of its own",
        why=f"{path} is a {held.type}, a generator that is not torch's, numpy's or Python's own: after the kill it began "
        "anew and draws other numbers",
        instead="draw from torch.rand, np.random or random, which the run keys for every step; or protect it, in a class "
        "with state_dict and load_state_dict",
        evidence=(
            f"when step {case.first.step} began its state was not that of the reference; in step {case.found.run.step} it "
            "is drawn from",
            *(["the batch of that step was another, for the same samples"] if _is_other_batch(case) else []),
            *_more(found),
        ),
    )


def _unprotected(case: DivergenceCase, *kinds: str) -> Cause | None:
    found = {path: pair for path, pair in case.lost.items() if pair[0].kind in kinds}
    if not found:
        return None
    path, (there, here) = next(iter(found.items()))
    was = f"it was {here.mark}, and {there.mark} in the reference"
    return Cause(
        word="not protected",
        why=f"{path}, {_about(there)}, is not protected: it began anew after the kill",
        instead=_TRAINING if path.endswith(".training") else _PROTECT[there.kind],
        evidence=(
            f"when step {case.first.step} began {'it was not as in the reference' if is_tensor(here.mark) else was}",
            *_more({each: pair[0] for each, pair in found.items()}),
        ),
    )


def _thing(case: DivergenceCase) -> Cause | None:
    """Whether an object with a state of its own was left unprotected."""
    return _unprotected(case, "scheduler", "optimizer", "buffer")


def _value(case: DivergenceCase) -> Cause | None:
    """Whether a tensor or a variable of the script's was left unprotected; the dataset's, if it gave other data."""
    if _is_other_batch(case) and not any(path.startswith("dataset") for path in case.lost):
        return None
    return _unprotected(case, "tensor") or _unprotected(case, "value")


def _after_the_boundary(case: DivergenceCase) -> Cause | None:
    """Whether the reference did something at the beginning of the window that the resumed run did not do.

    What a script does there in every window belongs to that window, and depends on something else that was lost.
    """
    mine, its = case.first, case.reference_window(case.first.step, case.first.rank)
    if its is None or mine.midway is None:
        return None
    missing = sorted(changed(its.begun, its.midway) - changed(mine.begun, mine.midway))
    missing = [path for path in missing if not case.is_a_habit(path)]
    if not missing:
        return None
    return Cause(
        word="work after the boundary",
        why=f"work after the boundary: the next batch is requested (as itertools.groupby does) before the script is done "
        f"with this one, so what it does then (it changes {_listed(missing)}) is not saved, and not repeated after a kill",
        instead="write `for epoch in run.epochs(...): for batch in epoch: ...`, with that work after the inner loop; or do "
        "it in the loop, before it asks for the next batch",
        evidence=(
            f"in the reference {_listed(missing)} changed after the batch of step {mine.step} was handed out and before its "
            "first gradient; after the kill it did not",
            *_too({path: pair[0] for path, pair in case.lost.items()}),
        ),
    )


def _other_data(case: DivergenceCase) -> Cause | None:
    its, mine = case.found.reference, case.found.run
    if not _is_other_batch(case) and its.drawn == mine.drawn:
        return None
    return Cause(
        word="other data",
        why=f"the dataset gave other data for the same samples in step {its.step}: it, or its collate, depends on something "
        "else than the sample's number and the generators of torch, numpy and Python",
        instead="draw from torch.rand, np.random or random, which the run keys for every step, and keep nothing from one "
        "sample to the next",
        evidence=(
            "the sample ids are the same, and the batch is not"
            if _is_other_batch(case)
            else "loading the batch drew other numbers",
        ),
    )


def _unknown(case: DivergenceCase) -> Cause:
    return Cause(
        word="unknown",
        why="no cause was found: everything that the script holds, as far as it can be seen from its variables, came back",
        instead="look for what lies outside of its variables: files, caches, compiled extensions, other processes; or a "
        "kernel that is not deterministic once in a while",
        evidence=("two runs that were not killed came out the same",),
    )


def _entropy(case: DivergenceCase) -> Cause | None:
    """Whether a generator had another state in each of two runs."""
    its, mine = case.found.reference, case.found.run
    found = {
        path: each
        for path, each in its.held.items()
        if each.kind == "generator" and mine.held.get(path) != each and case.moves(path)
    }
    if not found:
        return None
    path, held = next(iter(found.items()))
    return Cause(
        word="a generator of its own",
        why=f"{path} is a {held.type} that is seeded otherwise in every run",
        instead="draw from torch.rand, np.random or random, which the run keys for every step",
        evidence=(
            f"its state when step {its.step} began differs between two runs of which none was killed",
            *_more(found),
        ),
    )


def _other_start(case: DivergenceCase) -> Cause | None:
    its, mine = case.found.reference, case.found.run
    wrong = differing(its.begun, mine.begun)
    if not wrong:
        return None
    return Cause(
        word="not deterministic",
        why=f"{_listed(wrong)} is not the same when training begins: the first state is made from something that differs "
        "from run to run, or before hf.attach() keys the generators",
        instead="make the model after hf.attach(), and seed what is random",
        evidence=("it differed when the first batch was handed out, before anything was trained",),
    )


def _kernel(case: DivergenceCase) -> Cause:
    its, mine = case.found.reference, case.found.run
    others = [f"{path} ({each.type})" for path, each in its.held.items() if mine.held.get(path) != each]
    return Cause(
        word="not deterministic",
        why="a kernel that is not deterministic, or a clock or another process that the script asks",
        instead="set torch.use_deterministic_algorithms(True), which names such kernels (on CUDA with "
        "CUBLAS_WORKSPACE_CONFIG=:4096:8), and rehearse again",
        evidence=(
            f"when step {its.step} began, the protected state, the batch and all generators were the same in both runs; "
            "when it ended, the state was not",
            *([f"what the script holds that differed by then: {_listed(others)}"] if others else []),
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
_TRAINING = "call model.train() at the beginning of every step, or after every model.eval(), before the step ends"
_PROTECT = {
    "scheduler": "name it in protect(), as in run.protect(..., scheduler=scheduler)",
    "optimizer": "name it in protect(), as in run.protect(..., optimizer=optimizer)",
    "buffer": "register it with register_buffer(...), persistent, in a module that is protected",
    "tensor": "keep it in something with state_dict and load_state_dict, and name that in protect()",
    "value": "keep it in something with state_dict and load_state_dict, and name that in protect()",
}


def _is_other_batch(case: DivergenceCase) -> bool:
    its, mine = case.found.reference, case.found.run
    return its.ids == mine.ids and its.batch != mine.batch


def _listed(paths: Sequence[str]) -> str:
    rest = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _more(found: dict[str, UnprotectedValue]) -> tuple[str, ...]:
    return _too(dict(list(found.items())[1:]))


def _too(found: dict[str, UnprotectedValue]) -> tuple[str, ...]:
    others = [f"{path} ({each.type})" for path, each in found.items()]
    return (f"not as in the reference were also {_listed(others)}",) if others else ()


def _about(held: UnprotectedValue) -> str:
    if held.kind == "buffer":
        return "a tensor that a module keeps beside its state_dict"
    return f"{'an' if held.type[:1] in 'aeiouAEIOU' else 'a'} {held.type}"
