"""The first difference between two runs, what their workers observed, and classes for its likely cause. No I/O."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.rehearse.compare import Divergence, by_step, changed, lost
from holdfast.train.observe.observations import Observed, UnprotectedValue, Window, windows
from holdfast.train.state.plain_values import advice_for_value

SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The likely reason why a script does not resume exactly after a kill, with an explanation, remedy and evidence."""

    word: str
    why: str
    instead: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DivergenceCase:
    """The first difference between `run`, a run with kills, and `reference`, a run without; with data to explain it."""

    divergence: Divergence
    reference: Sequence[Observed]
    run: Sequence[Observed]
    unstable: frozenset[str] = frozenset()  # values outside `run.protect` that differ without a kill

    @property
    def first(self) -> Window:
        """The observations of the differing rank in the first step of the attempt in which the difference occurred."""
        run = self.divergence.run
        return next(w for w in windows(self.run) if (w.attempt, w.rank) == (run.attempt, run.rank))

    @property
    def lost(self) -> dict[str, tuple[UnprotectedValue, UnprotectedValue]]:
        """The values outside `run.protect` that the kill lost: for each path (value in `reference`, value in `run`)."""
        reference = self.reference_window(self.first.step, self.first.rank)
        return lost(reference, self.first, self.unstable) if reference else {}

    @property
    def resumed(self) -> list[Window]:
        """The first observation of each rank in the attempt in which the difference occurred."""
        first: dict[int, Window] = {}
        for window in windows(self.run):
            if window.attempt == self.divergence.run.attempt:
                first.setdefault(window.rank, window)
        return list(first.values())

    def reference_window(self, step: int, rank: int) -> Window | None:
        """Return the observations of `step` and `rank` in the reference run, or None if there are none."""
        return by_step(self.reference).get((step, rank))

    def usually_changes(self, path: str) -> bool:
        """Return True if the script changes the value at `path` in most steps, before a step's first gradient."""
        later = [window for window in windows(self.reference) if window.step]
        return 2 * sum(path in changed(window.begun, window.midway) for window in later) > len(later)

    def changed_in_reference(self, path: str) -> bool:
        """Return True if the reference run changed the value at `path` in the step whose results differ."""
        now = self.divergence.reference
        before = self.reference_window(now.step - 1, now.rank)
        was = before.kept.get(path) if before else now.held.get(path)
        return before is None or was != now.kept.get(path)


def listed(paths: Sequence[str]) -> str:
    """Return the first few paths in one line, followed by the number of further paths."""
    rest = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def others(values: dict[str, UnprotectedValue], skip: int = 0) -> tuple[str, ...]:
    """Return one line for a report that names the differing `values` after the first `skip`; () if there are none."""
    named = [f"{path} ({value.type})" for path, value in values.items()][skip:]
    return (f"these differ from the reference as well: {listed(named)}",) if named else ()


def described(value: UnprotectedValue) -> str:
    """Return the type of an unprotected value in words, such as "an int"."""
    if value.kind in ("buffer", "module"):
        return (
            "a tensor of a module that is not protected"
            if value.kind == "module"
            else "a tensor of a module that its state_dict leaves out"
        )
    return f"{'an' if value.type[:1] in 'aeiouAEIOU' else 'a'} {value.type}"


def protection(path: str, value: UnprotectedValue) -> str:
    """Return advice on how to change the script so that the value at `path` is restored after a kill."""
    if path.endswith(".training"):
        return _TRAINING
    if value.kind not in _PROTECT:
        return _OWN if value.type == "DTensor" else in_a_dict(path)
    return _PROTECT[value.kind]


def in_a_dict(path: str) -> str:
    """Return advice to keep the tensor or number at `path` in a protected dict, of which each rank's values are saved."""
    names = re.findall(r"[A-Za-z_]\w*", path.partition(" in ")[0])
    return advice_for_value(names[-1] if names else "value")


_OWN = "keep it in something with state_dict and load_state_dict, and name that in protect()"
_TRAINING = "call model.train() at the beginning of every step, or after every model.eval(), before the step ends"
_PROTECT = {
    "scheduler": "name it in protect(), as in run.protect(..., scheduler=scheduler)",
    "optimizer": "name it in protect(), as in run.protect(..., optimizer=optimizer)",
    "scaler": "name it in protect(), as in run.protect(..., scaler=scaler)",
    "module": "name its module in protect(), as in run.protect(..., ema=ema)",
    "buffer": "register it with register_buffer(...), persistent, in a module that is protected",
    "generator": "draw from torch.rand, np.random or random, which the run keys for every step; or protect it, in a class "
    "with state_dict and load_state_dict",
}
