"""What a rank says it is to train, and what makes a snapshot one of this run."""

import json
from collections.abc import Mapping

import xxhash

from holdfast.events import JSON, Plan
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import LENGTH, Geometry
from holdfast.train.data.draws import Draws
from holdfast.train.data.loader import Loads
from holdfast.train.data.stream import Streamed
from holdfast.train.probe import probe
from holdfast.train.state.protected import Protected


def plan(
    config: RunConfig, attempt: int, geometry: Geometry, fingerprint: str, shares: Loads, data: str | None
) -> Plan:
    """What is to be done in this attempt."""
    return Plan(
        attempt=attempt,
        samples=geometry.samples,
        batch=geometry.batch,
        epochs=geometry.epochs,
        seed=geometry.seed,
        save_every=config.save_every,
        writer=config.writer,
        config=fingerprint,
        data=data,
        own=isinstance(shares.dataset, Draws),
        loader=isinstance(shares, Streamed),
        limit=geometry.limit,
        extends=config.extend,
        command=xxhash.xxh3_64_hexdigest(json.dumps(config.args).encode()),
    )


def data_digest(geometry: Geometry, shares: Loads) -> str | None:
    """A digest of a few samples; none where the script draws them itself."""
    return None if isinstance(shares.dataset, Draws) else probe(shares.dataset, geometry.samples, geometry.seed)


def identity(geometry: Geometry, protected: Protected) -> str:
    """A digest of what makes a snapshot this run's: the geometry, and what the protected things are."""
    order = {name: value for name, value in geometry.to_json().items() if name not in LENGTH}  # a run may be extended
    told: Mapping[str, JSON] = {"geometry": order, "protected": protected.signature()}
    return xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True).encode())
