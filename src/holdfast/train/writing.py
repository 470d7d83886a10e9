"""The writer of a run's saves: into its store, as its schedule of failures and the other nodes allow."""

import os

from holdfast import progress
from holdfast.checkpoint import writer
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.terms import Fenced, Term
from holdfast.checkpoint.writer import Writer
from holdfast.distributed import ranks
from holdfast.distributed.ranks import Ranks
from holdfast.runs.config import RunConfig
from holdfast.train import inject
from holdfast.train.state.attempt import AttemptContext


def _fenced(store: Store, peers: Ranks) -> Store:
    """The store; of several nodes, only as long as others have not gone on without this one."""
    term, connect = os.environ.get(ranks.TERM), peers.connect
    if term is None or connect is None:
        return store

    def is_ours(newer: Term) -> bool:
        return bool(connect().check([ranks.ours(newer.token, int(os.environ[ranks.NODE]))]))

    return Fenced(store, int(term), is_ours)


def writer_for(config: RunConfig, attempt: AttemptContext, peers: Ranks) -> Writer:
    """The writer that the config names."""
    store = inject.faulty(
        _fenced(attempt.store, peers), config.failures, attempt.number, attempt.past.struck, attempt.folder
    )
    moves = progress.here.moves
    if config.writer == "blocking":
        return writer.blocking(store, keep_last=config.keep_last, progress=moves)
    return writer.overlapped(store, keep_last=config.keep_last, max_inflight=config.max_inflight, progress=moves)
