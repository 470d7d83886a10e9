"""The writer of a run's snapshots, with injected storage faults, and fenced off where other nodes took over."""

import os

from holdfast import progress
from holdfast.checkpoint import writer as writers
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.terms import Fenced, Term
from holdfast.checkpoint.writer import Writer
from holdfast.distributed import ranks as distributed
from holdfast.distributed.ranks import Ranks
from holdfast.runs.config import RunConfig
from holdfast.train import inject
from holdfast.train.state.attempt import AttemptContext


def writer_for(config: RunConfig, attempt: AttemptContext, ranks: Ranks) -> Writer:
    """Return the writer of snapshots. It injects planned storage faults, and rejects outdated nodes (see `_fenced`)."""
    store = inject.faulty(
        _fenced(attempt.store, ranks), config.failures, attempt.number, attempt.past.struck, attempt.folder
    )
    moves = progress.here.add_moved
    if config.writer == "blocking":
        return writers.blocking(store, keep_last=config.keep_last, progress=moves)
    return writers.overlapped(store, keep_last=config.keep_last, max_inflight=config.max_inflight, progress=moves)


def _fenced(store: Store, ranks: Ranks) -> Store:
    """Return `store`. On several nodes it is wrapped to refuse writes once other nodes continue without this one."""
    term, connect = os.environ.get(distributed.TERM), ranks.connect
    if term is None or connect is None:
        return store

    def is_ours(newer: Term) -> bool:
        return bool(connect().check([distributed.ours(newer.token, int(os.environ[distributed.NODE]))]))

    return Fenced(store, int(term), is_ours)
