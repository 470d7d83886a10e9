"""The likely cause of a divergence between two runs, from the observations of their workers. No I/O.

Each check returns a Cause with its evidence, or None. The first check that returns a cause decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.rehearse.compare import Divergence, by_step, changed, lost
from holdfast.train.observe.observations import (
    Ending,
    Observed,
    UnprotectedValue,
    Window,
    differing,
    is_tensor,
    windows,
)

SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The likely cause of a divergence: a short name, an explanation, what to do instead, and the evidence."""

    word: str
    why: str
    instead: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DivergenceCase:
    """A divergence of `run` from `reference`; `unstable` has the paths of values that differ even without a kill."""

    divergence: Divergence
    reference: Sequence[Observed]
    run: Sequence[Observed]
    unstable: frozenset[str] = frozenset()

    @property
    def first(self) -> Window:
        """The first window (one step of one rank) in the attempt that diverged."""
        run = self.divergence.run
        return next(w for w in windows(self.run) if (w.attempt, w.rank) == (run.attempt, run.rank))

    @property
    def lost(self) -> dict[str, tuple[UnprotectedValue, UnprotectedValue]]:
        """The unprotected values that were lost in the kill: (value in `reference`, value in `run`) by path."""
        reference = self.reference_window(self.first.step, self.first.rank)
        return lost(reference, self.first, self.unstable) if reference else {}

    def reference_window(self, step: int, rank: int) -> Window | None:
        """Return the observations of `step` and `rank` in the reference run, or None if there are none."""
        return by_step(self.reference).get((step, rank))

    def is_a_habit(self, path: str) -> bool:
        """Return True if, in most steps, the script changes the value at `path` before it computes a gradient."""
        later = [window for window in windows(self.reference) if window.step]
        return 2 * sum(path in changed(window.begun, window.midway) for window in later) > len(later)

    def moves(self, path: str) -> bool:
        """Return True if the reference run changed the value at `path` in the step that diverged."""
        now = self.divergence.reference
        before = self.reference_window(now.step - 1, now.rank)
        was = before.kept.get(path) if before else now.held.get(path)
        return before is None or was != now.kept.get(path)


def of_a_killed_run(case: DivergenceCase) -> Cause:
    """Return the likely cause of a divergence that began after a kill."""
    return next(cause for check in CHECKS if (cause := check(case)))


def of_unkilled_runs(case: DivergenceCase) -> Cause:
    """Return the likely cause of a divergence that no kill has caused."""
    return next(cause for check in UNKILLED_CHECKS if (cause := check(case)))


def _fetched_ahead(case: DivergenceCase) -> Cause | None:
    """Return a Cause if the script requests the next batch before it has trained the present one, otherwise None."""
    start, first = case.reference_window(0, case.first.rank), case.first
    reference = case.reference_window(first.step, first.rank)
    if start is None or reference is None or start.backwards or first.backwards or not reference.backwards:
        return None
    is_late = any(isinstance(ending, Ending) and ending.backwards for ending in case.reference)
    return Cause(
        word="fetched ahead",
        why="data fetched across a boundary: the script requests the next batch before it has trained this one, so a "
        "save in between counts a batch that is not trained yet, and after a kill it never will be",
        instead="train each batch before asking for the next; to load ahead, give run.batches(..., num_workers=2)",
        evidence=(
            "step 0 ended without a gradient: its batch was trained after the next one was requested",
            f"so did step {first.step}, the first after the kill, which has one in the reference: a batch was left out",
            *(["a batch was trained after the last step had ended"] if is_late else []),
        ),
    )


def _not_put_back(case: DivergenceCase) -> Cause | None:
    """Return a Cause if the protected state before the first step after the kill was not the saved one, else None."""
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
    """Return a Cause if an unprotected random generator was reset by the kill and then used, otherwise None."""
    values = {path: pair[0] for path, pair in case.lost.items() if pair[0].kind == "generator" and case.moves(path)}
    if not values:
        return None
    path, generator = next(iter(values.items()))
    return Cause(
        word="a generator of its own",
        why=f"{path} is a {generator.type}, a generator that is not torch's, numpy's or Python's own: after the kill it "
        "started over and draws other numbers",
        instead="draw from torch.rand, np.random or random, which the run keys for every step; or protect it, in a class "
        "with state_dict and load_state_dict",
        evidence=(
            f"when step {case.first.step} began its state was not that of the reference; in step {case.divergence.run.step} it "
            "is drawn from",
            *(["the batch of that step was another, for the same samples"] if _is_other_batch(case) else []),
            *_others(values, skip=1),
        ),
    )


def _unprotected(case: DivergenceCase, *kinds: str) -> Cause | None:
    values = {path: pair for path, pair in case.lost.items() if pair[0].kind in kinds}
    if not values:
        return None
    path, (there, here) = next(iter(values.items()))
    was = f"it was {here.mark}, and {there.mark} in the reference"
    description = f"{'an' if there.type[:1] in 'aeiouAEIOU' else 'a'} {there.type}"
    if there.kind == "buffer":
        description = "a tensor of a module that its state_dict leaves out"
    return Cause(
        word="not protected",
        why=f"{path}, {description}, is not protected: it started over after the kill",
        instead=_TRAINING if path.endswith(".training") else _PROTECT[there.kind],
        evidence=(
            f"when step {case.first.step} began {'it was not as in the reference' if is_tensor(here.mark) else was}",
            *_others({path: pair[0] for path, pair in values.items()}, skip=1),
        ),
    )


def _thing(case: DivergenceCase) -> Cause | None:
    return _unprotected(case, "scheduler", "optimizer", "buffer")


def _value(case: DivergenceCase) -> Cause | None:
    if _is_other_batch(case) and not any(path.startswith("dataset") for path in case.lost):
        return None
    return _unprotected(case, "tensor") or _unprotected(case, "value")


def _after_the_boundary(case: DivergenceCase) -> Cause | None:
    """Return a Cause if the script worked on the previous step after requesting the next batch, else None.

    Such work is not repeated after a kill. It shows as values that only the reference run changed between the start of
    the step and its first gradient. Values that the script changes there in most steps are ignored."""
    first, reference = case.first, case.reference_window(case.first.step, case.first.rank)
    if reference is None or first.midway is None:
        return None
    missing = sorted(changed(reference.begun, reference.midway) - changed(first.begun, first.midway))
    missing = [path for path in missing if not case.is_a_habit(path)]
    if not missing:
        return None
    return Cause(
        word="work after the boundary",
        why=f"work after the boundary: the next batch is requested (as itertools.groupby does) before the script is done "
        f"with this one, so what it does then (it changes {_listed(missing)}) is not saved, and not repeated after a kill",
        instead="write `for epoch in run.epochs(...): for batch in epoch: ...`, with that work after the inner loop; or do "
        "it in the loop, before it requests the next batch",
        evidence=(
            f"in the reference {_listed(missing)} changed after the batch of step {first.step} was handed out and before its "
            "first gradient; after the kill it did not",
            *_others({path: pair[0] for path, pair in case.lost.items()}),
        ),
    )


def _other_data(case: DivergenceCase) -> Cause | None:
    reference, run = case.divergence.reference, case.divergence.run
    if not _is_other_batch(case) and reference.drawn == run.drawn:
        return None
    return Cause(
        word="other data",
        why=f"the dataset gave other data for the same samples in step {reference.step}: it, or its collate_fn, depends on more "
        "than the sample's number and the generators of torch, numpy and Python",
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
        why="no cause was found: every value that can be reached from the script's variables came back",
        instead="look outside of its variables: files, caches, compiled extensions, other processes; or a kernel that is "
        "sometimes not deterministic",
        evidence=("two runs without a kill agree",),
    )


def _entropy(case: DivergenceCase) -> Cause | None:
    """Return a Cause if the state of a random generator differs between the two runs, otherwise None."""
    reference, run = case.divergence.reference, case.divergence.run
    values = {
        path: value
        for path, value in reference.held.items()
        if value.kind == "generator" and run.held.get(path) != value and case.moves(path)
    }
    if not values:
        return None
    path, generator = next(iter(values.items()))
    return Cause(
        word="a generator of its own",
        why=f"{path} is a {generator.type} that is seeded differently in every run",
        instead="draw from torch.rand, np.random or random, which the run keys for every step",
        evidence=(
            f"its state when step {reference.step} began differs between two runs without a kill",
            *_others(values, skip=1),
        ),
    )


def _other_start(case: DivergenceCase) -> Cause | None:
    wrong = differing(case.divergence.reference.begun, case.divergence.run.begun)
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
    reference, run = case.divergence.reference, case.divergence.run
    others = [f"{path} ({value.type})" for path, value in reference.held.items() if run.held.get(path) != value]
    return Cause(
        word="not deterministic",
        why="a kernel that is not deterministic, or a clock or another process that the script reads",
        instead="set torch.use_deterministic_algorithms(True), which names such kernels (on CUDA with "
        "CUBLAS_WORKSPACE_CONFIG=:4096:8), and rehearse again",
        evidence=(
            f"when step {reference.step} began, the protected state, the batch and all generators were the same in both runs; "
            "when it ended, the state was not",
            *([f"unprotected values that differed by then: {_listed(others)}"] if others else []),
        ),
    )


CHECKS = (_fetched_ahead, _not_put_back, _own_generator, _thing, _after_the_boundary, _value, _other_data, _unknown)
UNKILLED_CHECKS = (_entropy, _other_data, _other_start, _kernel)
_TRAINING = "call model.train() at the beginning of every step, or after every model.eval(), before the step ends"
_PROTECT = {
    "scheduler": "name it in protect(), as in run.protect(..., scheduler=scheduler)",
    "optimizer": "name it in protect(), as in run.protect(..., optimizer=optimizer)",
    "buffer": "register it with register_buffer(...), persistent, in a module that is protected",
    "tensor": "keep it in something with state_dict and load_state_dict, and name that in protect()",
    "value": "keep it in something with state_dict and load_state_dict, and name that in protect()",
}


def _is_other_batch(case: DivergenceCase) -> bool:
    reference, run = case.divergence.reference, case.divergence.run
    return reference.ids == run.ids and reference.batch != run.batch


def _listed(paths: Sequence[str]) -> str:
    rest = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _others(values: dict[str, UnprotectedValue], skip: int = 0) -> tuple[str, ...]:
    others = [f"{path} ({value.type})" for path, value in values.items()][skip:]
    return (f"these differ from the reference as well: {_listed(others)}",) if others else ()
