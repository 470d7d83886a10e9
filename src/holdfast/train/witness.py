"""Detection of silent data corruption: every few steps, all ranks digest their whole state, and rank 0 compares.

A digest is computed on the device, between two steps. It travels through the workers' store, in a thread, so training
does not wait. The ranks take a digest before every save, too. So each snapshot is known to be good, or not, before the
next one is committed, and a run that finds a flipped bit restarts from a snapshot of a step at which all ranks agreed.
"""

import json
import logging
import threading
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast import progress
from holdfast.distributed.ranks import Ranks, RanksChanged
from holdfast.errors import StateCorrupted, WorkerLost
from holdfast.events import Corruption, Witnessed
from holdfast.train.divergence import StateDifference, compare_states, find_origin
from holdfast.train.state.attempt import Recorder
from holdfast.train.whole_digest import WholeDigest, are_finite

logger = logging.getLogger(__name__)
PATIENCE = 60.0  # seconds to wait for the comparison of an earlier witness, which is due within a step


@dataclass(frozen=True, slots=True)
class ComparedState:
    """The tensors of this rank that other ranks also have, by name.

    The tensors in `own` are the same on all ranks of the `group`, such as all replicas. Of a sharded model, they are this
    rank's shard, and `copy` is its copy of the shard of the rank `apart` ranks before it."""

    own: Mapping[str, torch.Tensor]
    copy: Mapping[str, torch.Tensor] | None = None
    group: int = 0
    apart: int = 1


@dataclass(slots=True, kw_only=True, eq=False)
class Witness:
    """One rank's part in comparing the states of all ranks, every `every` steps and before every save.

    `agreed` is the last step before which all ranks are known to have agreed."""

    every: int
    ranks: Ranks
    attempt: int
    record: Recorder
    state: Callable[[], ComparedState]
    weights: Callable[[], Sequence[torch.Tensor]]  # that must not become infinite or NaN
    take_bad_loss: Callable[[], int | None]  # see StepRecorder
    agreed: int | None
    diverged: int | None = None  # an earlier attempt had infinite weights before this step
    _expects_finite: bool = False
    _digest: WholeDigest = field(default_factory=WholeDigest)
    _taken: int = -1
    _pending: "_Comparison | None" = None

    @property
    def next(self) -> int:
        """The step before which the states are compared next."""
        return (self._taken // self.every + 1) * self.every

    @property
    def is_under_way(self) -> bool:
        """True while the result of a comparison is not known, or not recorded."""
        return self._pending is not None

    def take(self, step: int) -> None:
        """Digest the state of this rank before `step`, and let a thread compare it with that of the other ranks."""
        if step <= self._taken:
            return
        self.wait()
        previous, self._taken = self._taken, step
        state = self.state()
        digests = [self._digest(list(tensors.values())) for tensors in (state.own, state.copy) if tensors is not None]
        parts = [_to_host(part) for part in (are_finite(self.weights()), *digests)]
        arrived = None
        if self.ranks.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        may_diverge = not self._expects_finite or (self.diverged is not None and step <= self.diverged)
        self._pending = _Comparison(
            step=step,
            previous=previous,
            ranks=self.ranks.fixed(),
            group=state.group,
            apart=state.apart,
            names=list(state.own),
            parts=parts,
            arrived=arrived,
            bad_loss=self.take_bad_loss(),
            may_diverge=may_diverge,
        )
        self._pending.start()

    def collect(self) -> None:
        """Record the result of a comparison that has ended; raise StateCorrupted if the states of the ranks differ."""
        if self._pending and not self._pending.is_alive():
            ended, self._pending = self._pending, None
            if ended.error:
                self._fail(ended, ended.error)
            if ended.has_agreed:
                self.agreed, self._expects_finite = ended.step, ended.is_finite
                digest, *copy = ended.digests
                self.record.append(
                    Witnessed(self.attempt, ended.step, digest, copy[0] if copy else None, ended.group, ended.apart)
                )

    def wait(self) -> None:
        """Wait until the comparison that is under way has ended, and collect its result."""
        if self._pending:
            self._pending.join(PATIENCE)
            if self._pending.is_alive():
                logger.warning("holdfast: the states before step %d were not compared in time", self._pending.step)
                self._pending = None
        self.collect()

    def regroup(self, settled: int | None) -> None:
        """Adapt to changed ranks. Skip a comparison before step `settled`, which some ranks may already be training."""
        if settled is not None:
            self._taken = max(self._taken, settled)

    def _fail(self, ended: "_Comparison", error: StateDifference) -> None:
        if self.ranks.rank == 0:
            self.record.append(
                Corruption(
                    attempt=self.attempt,
                    step=ended.step,
                    agreed=self.agreed,
                    ranks=error.ranks,
                    culprit=error.culprit,
                    because=error.because,
                    digests=ended.all_digests[0],
                    copies=ended.all_digests[1],
                    apart=ended.apart,
                    finite=error.is_finite,
                )
            )
            self.record.flush()
            self.record.sync()  # before the other ranks end: the next attempt reads it
            ended.tell(error)
        progress.here.has_fallen_back = True  # only a restart helps: the gradients of all ranks may be wrong
        since = "from the beginning" if self.agreed is None else f"from its newest snapshot up to step {self.agreed}"
        other = "the script changes the state of a rank" if error.is_finite else "training diverges by itself"
        raise StateCorrupted(
            f"{error.because} before step {ended.step}: a bit has flipped, or {other}. The run restarts {since}.",
            error.culprit,
        )


class _Comparison(threading.Thread):
    """The comparison of the states of all ranks before one step, in a thread."""

    def __init__(
        self,
        *,
        step: int,
        previous: int,
        ranks: Ranks,
        group: int,
        apart: int,
        names: Sequence[str],
        parts: Sequence[torch.Tensor],
        arrived: torch.cuda.Event | None,
        bad_loss: int | None,
        may_diverge: bool,
    ) -> None:
        super().__init__(name="holdfast-witness", daemon=True)
        self.step, self.group, self.apart = step, group, apart
        self.error: StateDifference | None = None
        self.has_agreed = self.is_finite = False
        self.digests: list[str] = []
        self.all_digests: tuple[list[str], list[str]] = ([], [])  # of all ranks: their states, and their copies
        self._previous, self._ranks = previous, ranks
        self._names, self._parts, self._arrived = names, parts, arrived
        self._bad_loss, self._may_diverge = bad_loss, may_diverge

    def run(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()
        finite, *parts = (part.numpy() for part in self._parts)
        self.digests = [_hex(digests) for digests in parts]
        names = xxhash.xxh3_64_hexdigest(json.dumps(list(self._names)).encode())
        message = json.dumps(
            [
                names,
                self.group,
                bool(finite),
                self._bad_loss,
                *(b64encode(digests.tobytes()).decode() for digests in parts),
            ]
        )
        try:
            messages = self._ranks.gather(f"witness/{self.step}", message)
            if messages is None:
                self.has_agreed, self.is_finite, error = json.loads(self._ranks.wait_for(_verdict(self.step)))
                self.error = StateDifference(tuple(error[0]), *error[1:]) if error else None
            else:
                self._ranks.store.delete_key(_verdict(self._previous))  # all ranks have read it
                self._judge([json.loads(text) for text in messages])
        except (RanksChanged, WorkerLost, RuntimeError):
            pass  # a rank was lost, which training notices

    def _judge(self, messages: Sequence[Any]) -> None:
        if len({names for names, *_ in messages}) > 1:
            logger.warning("holdfast: the ranks have different tensors before step %d: not compared", self.step)
            self.tell(None)
            return
        own, *copies = zip(*(map(_decoded, parts) for _, _, _, _, *parts in messages), strict=True)
        self.all_digests = ([_hex(digests) for digests in own], [_hex(digests) for digests in sum(copies, ())])
        groups: defaultdict[int, dict[int, list[tuple[int, int]]]] = defaultdict(dict)
        for rank, (message, digests) in enumerate(zip(messages, own, strict=True)):
            groups[message[1]][rank] = _pairs(digests)
        for rank, digests in enumerate(copies[0] if copies else ()):
            groups[(rank - self.apart) % len(own)][rank] = _pairs(digests)
        self.error = compare_states(list(groups.values()), self._names, "copy of a shard" if copies else "state")
        self.is_finite = all(finite for _, _, finite, *_ in messages)
        if not (self.error or self.is_finite or self._may_diverge):
            self.error = find_origin([bad_loss for _, _, _, bad_loss, *_ in messages])
        self.has_agreed = self.error is None
        if self.has_agreed:  # otherwise rank 0 first records the error
            self.tell(None)

    def tell(self, error: StateDifference | None) -> None:
        """Tell the other ranks the result."""
        self._ranks.post(_verdict(self.step), json.dumps([self.has_agreed, self.is_finite, error and astuple(error)]))


def _to_host(digests: torch.Tensor) -> torch.Tensor:
    if not digests.is_cuda:
        return digests
    host = torch.empty(digests.shape, dtype=digests.dtype, pin_memory=True)
    return host.copy_(digests, non_blocking=True)


def _verdict(step: int) -> str:
    return f"witness/{step}/verdict"


def _decoded(text: str) -> Any:
    return np.frombuffer(b64decode(text), np.int64).reshape(-1, 2)


def _pairs(digests: Any) -> list[tuple[int, int]]:
    return [(int(one), int(two)) for one, two in digests]


def _hex(digests: Any) -> str:
    return str(xxhash.xxh3_128_hexdigest(digests.tobytes()))
