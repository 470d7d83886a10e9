"""The rules for settings that both the command and the script give, and the warnings about those without effect. Pure.

The seed is that of `holdfast run --seed`, otherwise that of `attach(seed=...)`, otherwise what the script gave to
`torch.manual_seed` before attach, otherwise 0; a run that resumes keeps its seed. For every other parameter of attach,
the command's value counts.
"""

from collections.abc import Mapping

from holdfast.errors import BadInput
from holdfast.sampler.plan import SEEDS

UNSAVED = "holdfast: nothing is saved, since the run has no folder: give attach(out=...), or start the script by `holdfast run`."


def seed_of_run(
    command: int | None, attached: int | None, script: int | None, recorded: int | None
) -> tuple[int, str | None]:
    """Return the seed, and a warning about given seeds that have no effect."""
    if command is None and recorded is not None and attached not in (None, recorded):
        raise BadInput(
            f"the seed is {attached}, not {recorded} with which this run began: give attach() the same, or name another "
            "folder for a run with another seed"
        )
    given = {
        f"--seed {command}": command,
        "the one this run began with": recorded,
        f"attach(seed={attached})": attached,
        f"torch.manual_seed({script})": script,
    }
    seeds = {words: seed for words, seed in given.items() if seed is not None}
    if not seeds:
        return 0, None
    winner, seed = next(iter(seeds.items()))
    if not 0 <= seed < SEEDS:
        raise BadInput(f"the seed {seed} does not fit 64 bits: give 0 to {SEEDS - 1}")
    without_effect = [
        words for words, other in seeds.items() if other != seed and words != "the one this run began with"
    ]
    if not without_effect:
        return seed, None
    return seed, f"holdfast: the seed is {seed} ({winner}): {_without_effect(without_effect)}."


def seeded_late(script: int | None) -> str | None:
    """Return a warning about a seed that the script gave after attach."""
    if script is None:
        return None
    return (
        f"holdfast: torch.manual_seed({script}) after attach() has no effect on the order of samples or on what is drawn in "
        f"the loop: call it before attach(), or write attach(seed={script})."
    )


def overridden(given: Mapping[str, object], command: Mapping[str, object]) -> str | None:
    """Return a warning about arguments of attach that differ from the command's options."""
    lost = {name: value for name, value in given.items() if value is not None and value != command[name]}
    if not lost:
        return None
    says = ", ".join(f"--{name.replace('_', '-')} {command[name]}" for name in lost)
    return f"holdfast: the command says {says}: {_without_effect([f'attach({name}={value!r})' for name, value in lost.items()])}."


def _without_effect(names: list[str]) -> str:
    return f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect"
