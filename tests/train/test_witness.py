"""The witness of a rank: all ranks compare their states in a thread, and all of them learn what is wrong."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public

from holdfast.distributed.ranks import Ranks
from holdfast.errors import StateCorrupted
from holdfast.events import Corruption, Witnessed
from holdfast.train.state.attempt import NoRecorder
from holdfast.train.witness import ComparedState, Witness

LIMIT = 20.0  # seconds


@dataclass
class Memory(NoRecorder):
    """A recorder that keeps the events."""

    events: list[Any] = field(default_factory=list)

    def append(self, what: Any, time: float | None = None) -> None:
        self.events.append(what)


def witnesses(
    states: Sequence[ComparedState], bad_losses: Mapping[int, int] = MappingProxyType({}), **settings: Any
) -> list[Witness]:
    store = HashStore()
    return [
        Witness(
            every=10,
            ranks=Ranks(
                rank=rank, size=len(states), store=store, grouped=True, device=torch.device("cpu"), patience=LIMIT
            ),
            attempt=1,
            record=Memory(),
            state=lambda state=state: state,  # type: ignore[misc]
            weights=lambda state=state: [*state.own.values()],  # type: ignore[misc]
            take_bad_loss=lambda rank=rank: bad_losses.get(rank),  # type: ignore[misc]
            agreed=None,
            **settings,
        )
        for rank, state in enumerate(states)
    ]


def replicas(count: int) -> list[ComparedState]:
    return [ComparedState({"weight": torch.arange(6.0), "exp_avg of weight": torch.ones(6)}) for _ in range(count)]


def flip(state: ComparedState, name: str = "weight", *, copied: bool = False) -> None:
    tensors = state.copy if copied else state.own
    assert tensors is not None
    tensors[name].view(torch.int32)[3] ^= 1


def take(ranks: Sequence[Witness], step: int) -> list[str]:
    """Let all ranks compare before `step`; return what each raises."""
    for rank in ranks:
        rank.take(step)
    errors = []
    deadline = time.monotonic() + LIMIT
    for rank in ranks:
        try:
            while rank.is_under_way:
                assert time.monotonic() < deadline
                rank.collect()
                time.sleep(0.001)
        except StateCorrupted as error:
            errors.append(f"{error.rank}: {error}")
    return errors


def events(rank: Witness) -> list[Any]:
    assert isinstance(rank.record, Memory)
    return rank.record.events


def test_equal_replicas_agree_and_every_rank_records_the_digest() -> None:
    ranks = witnesses(replicas(3))
    assert [rank.next for rank in ranks] == [0, 0, 0]
    assert take(ranks, 0) == []
    assert take(ranks, 10) == []
    assert [rank.agreed for rank in ranks] == [10, 10, 10]
    assert events(ranks[0]) == events(ranks[2])
    assert [(type(event), event.step) for event in events(ranks[1])] == [(Witnessed, 0), (Witnessed, 10)]


def test_a_flipped_bit_is_found_by_all_ranks_and_rank_0_records_which_rank_is_wrong() -> None:
    states = replicas(3)
    ranks = witnesses(states)
    take(ranks, 0)
    flip(states[1], "exp_avg of weight")
    errors = take(ranks, 10)
    assert len(errors) == 3
    assert {error.partition(" before step")[0] for error in errors} == {
        "1: rank 1 had another state than ranks 0 and 2 (exp_avg of weight)"
    }
    assert "restarts from its newest snapshot up to step 0" in errors[0]
    recorded = [event for event in events(ranks[0]) if isinstance(event, Corruption)]
    assert [(event.step, event.agreed, event.ranks, event.culprit) for event in recorded] == [(10, 0, (1,), 1)]
    assert len(set(recorded[0].digests)) == 2
    assert not any(isinstance(event, Corruption) for event in events(ranks[1]))


def test_a_copy_that_differs_from_its_shard_is_found() -> None:
    shards = [{"weight": torch.randn(5)} for _ in range(3)]
    copies = [{"weight": shards[rank - 1]["weight"].clone()} for rank in range(3)]
    states = [ComparedState(shards[rank], copies[rank], rank) for rank in range(3)]
    ranks = witnesses(states)
    assert take(ranks, 0) == []
    assert events(ranks[1])[0].copy == events(ranks[0])[0].digest
    flip(states[2], copied=True)
    errors = take(ranks, 10)
    assert len(errors) == 3
    assert errors[0].startswith("None: ranks 1 and 2 differ in their copy of a shard (weight; no majority")


def test_each_shard_is_compared_with_those_of_the_other_replicas_of_it() -> None:
    states = [ComparedState({"weight": torch.full((4,), float(rank % 2))}, group=rank % 2) for rank in range(6)]
    ranks = witnesses(states)
    assert take(ranks, 0) == []
    flip(states[3])
    assert take(ranks, 10)[5].startswith("3: rank 3 had another state than ranks 1 and 5 (weight) before step 10")


def become_nan(states: Sequence[ComparedState]) -> None:
    for state in states:
        state.own["weight"].fill_(float("nan"))


def test_weights_that_become_nan_on_all_ranks_are_found_and_the_first_such_loss_names_the_rank() -> None:
    for bad_losses, culprit in (({0: 8, 1: 7, 2: 8}, 1), ({0: 7, 1: 7}, None), ({}, None)):
        states = replicas(3)
        ranks = witnesses(states, bad_losses)
        assert take(ranks, 0) == []
        become_nan(states)
        errors = take(ranks, 10)
        assert {error.partition(":")[0] for error in errors} == {str(culprit)}
        assert "the weights of all ranks have become infinite or NaN" in errors[2]
        recorded = events(ranks[0])[-1]
        assert (recorded.culprit, recorded.finite) == (culprit, False)


def test_weights_that_are_nan_from_the_beginning_or_again_when_repeated_are_not_blamed_on_a_bit() -> None:
    states = replicas(2)
    become_nan(states)
    ranks = witnesses(states)
    assert [take(ranks, step) for step in (0, 10)] == [[], []]
    states = replicas(2)
    ranks = witnesses(states, diverged=10)
    assert take(ranks, 0) == []
    become_nan(states)
    assert [take(ranks, step) for step in (10, 20)] == [[], []]


def test_ranks_with_other_tensors_are_not_compared() -> None:
    states = [ComparedState({"a": torch.ones(2)}), ComparedState({"b": torch.zeros(2)})]
    ranks = witnesses(states)
    assert take(ranks, 0) == []
    assert [rank.agreed for rank in ranks] == [None, None]
    assert events(ranks[0]) == []


def test_a_comparison_ends_before_the_next_begins() -> None:
    states = replicas(2)
    ranks = witnesses(states)
    threads = [threading.Thread(target=take_often, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert [rank.agreed for rank in ranks] == [8, 8]
    assert [event.step for event in events(ranks[1])] == list(range(9))


def take_often(rank: Witness) -> None:
    for step in range(9):
        rank.take(step)
    rank.wait()


def test_a_step_that_some_ranks_may_have_passed_is_left_out() -> None:
    (rank,) = witnesses(replicas(1))
    rank.regroup(10)
    assert rank.next == 20
    rank.take(10)
    assert not rank.is_under_way
