"""The likely cause of a divergence between two runs, from the observations of their workers. No I/O.

Each check returns a Cause with its evidence, or None. The first check that returns a cause decides. Even if the
protected state is the same, a kill may have lost other values. If the script computes such a value from its own old
value, the value stays wrong, and is reported. Plain numbers are not, because they may be counts only for the log.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from holdfast.rehearse.case import Cause, DivergenceCase, described, in_a_dict, listed, others, protection
from holdfast.rehearse.compare import by_step, changed
from holdfast.rehearse.loop_counter import STATISTICS, loop_counter, moved_counters
from holdfast.train.observe.observations import (
    Ending,
    Observed,
    UnprotectedValue,
    Window,
    differing,
    is_tensor,
    windows,
)

_ONE_VALUE = re.compile(r"tensor (numpy )?\w+\[1?\] ")


def of_a_killed_run(case: DivergenceCase) -> Cause:
    return next(cause for check in CHECKS if (cause := check(case)))


def of_unkilled_runs(case: DivergenceCase) -> Cause:
    return next(cause for check in UNKILLED_CHECKS if (cause := check(case)))


def _fetched_ahead(case: DivergenceCase) -> Cause | None:
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
    saved, own = (case.reference_window(case.first.step, rank) for rank in (0, case.first.rank))
    wrong = differing(saved.begun, case.first.begun) if saved else []
    wrong = [path for path in wrong if own is None or own.begun.get(path) != case.first.begun.get(path)]
    if not wrong:
        return None
    return Cause(
        word="not put back",
        why=f"{listed(wrong)} was not as saved when step {case.first.step} began: its load_state_dict does not put back "
        "what its state_dict gave, or the script changes it between protect() and the loop",
        instead="call run.protect(...) last before the loop, and have load_state_dict take all that state_dict gives",
        evidence=("it differed when the first batch after the kill was handed out, before anything was trained",),
    )


def _own_generator(case: DivergenceCase) -> Cause | None:
    values = {
        path: pair[0]
        for path, pair in case.lost.items()
        if pair[0].kind == "generator" and case.changed_in_reference(path)
    }
    if not values:
        return None
    path, generator = next(iter(values.items()))
    return Cause(
        word="a generator of its own",
        why=f"{path} is a {generator.type} that the script made, and the run sets only the global generators: after the kill it "
        "started over and draws other numbers",
        instead=protection(path, generator),
        evidence=(
            f"when step {case.first.step} began its state was not that of the reference; in step {case.divergence.run.step} it "
            "is drawn from",
            *(["the batch of that step was another, for the same samples"] if _is_other_batch(case) else []),
            *others(values, skip=1),
        ),
    )


def _unprotected(case: DivergenceCase, *kinds: str) -> Cause | None:
    values = {path: pair for path, pair in case.lost.items() if pair[0].kind in kinds}
    if not values:
        return None
    path, (there, here) = next(iter(values.items()))
    was = f"it was {here.mark}, and {there.mark} in the reference"
    return Cause(
        word="not protected",
        why=f"{path}, {described(there)}, is not protected: it started over after the kill",
        instead=protection(path, there),
        evidence=(
            f"when step {case.first.step} began {'it was not as in the reference' if is_tensor(here.mark) else was}",
            *others({path: pair[0] for path, pair in values.items()}, skip=1),
            *moved_counters(case),
        ),
    )


def _thing(case: DivergenceCase) -> Cause | None:
    return _unprotected(case, "scheduler", "optimizer", "scaler", "module", "buffer")


def _value(case: DivergenceCase) -> Cause | None:
    if _is_other_batch(case) and not any(path.startswith("dataset") for path in case.lost):
        return None
    return _unprotected(case, "tensor") or _unprotected(case, "value")


def _after_the_boundary(case: DivergenceCase) -> Cause | None:
    """Return a Cause if the script changes values too late to be saved: after it asked for the next batch."""
    first, reference = case.first, case.reference_window(case.first.step, case.first.rank)
    if reference is None or first.midway is None:
        return None
    missing = sorted(changed(reference.begun, reference.midway) - changed(first.begun, first.midway))
    missing = [path for path in missing if not case.usually_changes(path)]
    if not missing:
        return None
    return Cause(
        word="work after the boundary",
        why=f"work after the boundary: the next batch is requested (as itertools.groupby does) before the script is done "
        f"with this one, so what it does then (it changes {listed(missing)}) is not saved, and not repeated after a kill",
        instead="write `for epoch in run.epochs(...): for batch in epoch: ...`, with that work after the inner loop; or do "
        "it in the loop, before it requests the next batch",
        evidence=(
            f"in the reference {listed(missing)} changed after the batch of step {first.step} was handed out and before its "
            "first gradient; after the kill it did not",
            *others({path: pair[0] for path, pair in case.lost.items()}),
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


def _of_rank_0(case: DivergenceCase) -> Cause | None:
    """Return a Cause if a protected value differs between ranks, and a rank got that of rank 0 back."""
    wrong = {path: window.rank for window in case.resumed for path in _replaced_by_rank_0(case, window)}
    if not wrong:
        return None
    return Cause(
        word="differs between ranks",
        why=f"{listed(list(wrong))} {'differs' if len(wrong) == 1 else 'differ'} between ranks, and of modules and own "
        f"objects only rank 0's values are saved: rank {min(wrong.values())} continued with those of rank 0",
        instead=in_a_dict(next(iter(wrong))),
        evidence=("in the reference, the ranks had different values when this step began",),
    )


def _replaced_by_rank_0(case: DivergenceCase, window: Window) -> list[str]:
    own, saved = (case.reference_window(window.step, rank) for rank in (window.rank, 0))
    if own is None or saved is None:
        return []
    return [
        path
        for path in differing(own.begun, window.begun)
        if window.begun.get(path) == saved.begun.get(path) and not path.endswith(STATISTICS)  # DDP sends these anyway
    ]


def _unknown(case: DivergenceCase) -> Cause:
    return Cause(
        word="unknown",
        why="no cause was found: every value that can be reached from the script's variables came back",
        instead="look outside of its variables: files, caches, compiled extensions, other processes; or a kernel that is "
        "sometimes not deterministic",
        evidence=("two runs without a kill agree",),
    )


def _entropy(case: DivergenceCase) -> Cause | None:
    reference, run = case.divergence.reference, case.divergence.run
    values = {
        path: value
        for path, value in reference.held.items()
        if value.kind == "generator" and run.held.get(path) != value and case.changed_in_reference(path)
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
            *others(values, skip=1),
        ),
    )


def _other_start(case: DivergenceCase) -> Cause | None:
    wrong = differing(case.divergence.reference.begun, case.divergence.run.begun)
    if not wrong:
        return None
    return Cause(
        word="not deterministic",
        why=f"{listed(wrong)} is not the same when training begins: the first state is made from something that differs "
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
            *([f"unprotected values that differed by then: {listed(others)}"] if others else []),
        ),
    )


CHECKS = (
    _fetched_ahead,
    _not_put_back,
    _own_generator,
    _thing,
    _after_the_boundary,
    _value,
    loop_counter,
    _other_data,
    _of_rank_0,
    _unknown,
)
UNKILLED_CHECKS = (_entropy, _other_data, _other_start, _kernel)


def _is_other_batch(case: DivergenceCase) -> bool:
    reference, run = case.divergence.reference, case.divergence.run
    return reference.ids == run.ids and reference.batch != run.batch


def of_forgotten(
    forgotten: Mapping[str, UnprotectedValue], reference: Sequence[Observed], run: Sequence[Observed]
) -> Cause | None:
    """Return a Cause if the script computes one of the `forgotten` values, which a kill lost, from its own old value."""
    read = {path: forgotten[path] for path in _read_again(forgotten, reference, run) if _is_state(forgotten[path])}
    if not read:
        return None
    path, value = next(iter(read.items()))
    return Cause(
        word="not protected",
        why=f"{path}, {described(value)}, is not protected: it started over after a kill, and the script computes it from "
        "its old value, so it stays wrong",
        instead=protection(path, value),
        evidence=("every bit of the protected state is the same after each step", *others(read, skip=1)),
    )


def _read_again(paths: Iterable[str], reference: Sequence[Observed], run: Sequence[Observed]) -> list[str]:
    """Return the `paths` of values that are still wrong in `run` after a step that changed them in `reference`."""
    expected = by_step(reference)
    pairs = [(expected.get((window.step, window.rank)), window) for window in windows(run) if window.attempt > 1]
    return [
        path
        for path in paths
        if any(
            right is not None
            and right.held.get(path) != right.kept.get(path)
            and path in window.kept
            and window.kept[path] != right.kept.get(path)
            for right, window in pairs
        )
    ]


def _is_state(value: UnprotectedValue) -> bool:
    return value.kind != "value" and not _ONE_VALUE.match(value.mark)
