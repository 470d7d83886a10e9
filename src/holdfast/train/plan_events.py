"""The plan of a run as its event describes it, and the digests by which data and snapshots of the run are recognised."""

import json
from typing import Any

import xxhash

from holdfast.events import Plan
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import LENGTH
from holdfast.sampler.run_plan import RunPlan
from holdfast.train.data.dataset import probe
from holdfast.train.data.phases import Phases, TrainingPhase
from holdfast.train.data.stream import OwnSamples, Streamed
from holdfast.train.state.protected import Protected
from holdfast.train.state.save import Conditions


def plan_event(config: RunConfig, attempt: int, phases: Phases, fingerprint: str, conditions: Conditions) -> Plan:
    """Return the event that describes what a rank will train in an attempt, and how its state is saved."""
    first, *later = (_plan_fields(phases[index], data) for index, data in enumerate(conditions.all_data))
    return Plan(
        attempt=attempt,
        save_every=config.save_every,
        writer=config.writer,
        config=fingerprint,
        loader=isinstance(phases[0].loads, Streamed),
        extends=config.extend,
        command=xxhash.xxh3_64_hexdigest(json.dumps(config.args).encode()),
        later_phases=tuple(later),
        **first,
    )


def data_digest(phase: TrainingPhase) -> str | None:
    """Return a digest of a few samples of a phase; None if the script draws its samples itself."""
    dataset = phase.loads.dataset
    return None if isinstance(dataset, OwnSamples) else probe(dataset, len(dataset), phase.plan.seed)


def _plan_fields(phase: TrainingPhase, data: str | None) -> dict[str, Any]:
    """Return the fields of a plan event that describe a phase, without those that have their default value."""
    fields = {**phase.plan.to_json(), "data": data, "own": isinstance(phase.loads.dataset, OwnSamples)}
    return {name: value for name, value in fields.items() if value is not None and value is not False}


def identity(plan: RunPlan, protected: Protected) -> str:
    """Return a digest that identifies the snapshots of this run: of the sample order and the protected objects."""
    first = plan.phases[0].to_json()  # a run may be extended: made longer, or by another phase
    order = {name: value for name, value in first.items() if name not in LENGTH}
    parts = {"geometry": order, "protected": protected.signature()}
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())
