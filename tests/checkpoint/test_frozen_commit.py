"""A node that was frozen just before a request, while other nodes continued, breaks no snapshot when it runs again."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import manifest, payload, retention, snapshot
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.checkpoint.terms import Fenced, Term, take
from holdfast.errors import CommitConflict

STEP = 3
OLD = {"w": torch.arange(8.0)}
NEW = {"w": torch.arange(8.0) + 100}


class Freezing(DirectoryStore):
    """A store that calls `meanwhile` once, just before the first request for which `strikes(verb, name)` is true."""

    def __init__(self, path: Path, strikes: Callable[[str, str], bool], meanwhile: Callable[[], object]) -> None:
        super().__init__(path)
        self._strikes, self._meanwhile = strikes, [meanwhile]

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self._freeze("put", name)
        super().put(name, parts)

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self._freeze("create", name)
        super().create(name, parts)

    def _freeze(self, verb: str, name: str) -> None:
        if self._meanwhile and self._strikes(verb, name):
            self._meanwhile.pop()()


def commits(verb: str, name: str) -> bool:
    return verb == "create" and name.endswith("manifest.json")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path)
    take(store, Term(1, "a", "node0:1", (0, 1)))
    return store


def write(store: Store, tensors: dict[str, torch.Tensor]) -> Digest:
    return snapshot.write_shard(store, STEP, payload.encode(tensors, digests=True))


def save(store: Store, tensors: dict[str, torch.Tensor]) -> None:
    snapshot.commit(store, snapshot.draft(STEP, {}, snapshot.undivided(tensors)), [write(store, tensors)])


def continue_as(store: Store, number: int) -> Fenced:
    """Let other nodes continue as term `number`, and restore: their rank 0 removes what is left of unfinished saves."""
    take(store, Term(number, f"token {number}", "node1:1", (1,)))
    continued = Fenced(store, number)
    retention.tidy(continued, 2)
    return continued


def loaded(store: Store) -> torch.Tensor:
    return torch.as_tensor(snapshot.load(store, STEP).tensors["w"])


def test_it_does_not_commit_a_save_whose_parts_were_removed(store: DirectoryStore) -> None:
    frozen = Freezing(store.path, commits, lambda: continue_as(store, 2))
    with pytest.raises(CommitConflict):
        save(Fenced(frozen, 1), OLD)
    assert manifest.steps(store) == []
    assert store.names("step-") == ["step-00000003/manifest.json"], "only the mark that closes the folder is left"


def test_a_commit_that_comes_first_keeps_its_parts(store: DirectoryStore) -> None:
    write(store, OLD)
    store.put(manifest.extra_name(STEP), [b"{}"])
    continue_as(Freezing(store.path, commits, lambda: save(store, OLD)), 2)
    assert torch.equal(loaded(store), OLD["w"])


def test_it_commits_nothing_once_the_nodes_that_continue_have_chosen_what_to_restore(store: DirectoryStore) -> None:
    def choose() -> None:
        take(store, Term(2, "token 2", "node1:1", (1,)))
        chosen.append(retention.resume(Fenced(store, 2), lambda step: step))

    chosen: list[object] = []
    with pytest.raises(CommitConflict):
        save(Fenced(Freezing(store.path, commits, choose), 1), OLD)
    assert chosen == [(None, ())]
    assert manifest.steps(store) == []


def test_the_nodes_that_continue_restore_what_it_commits_before_they_choose(store: DirectoryStore) -> None:
    write(store, OLD)
    store.put(manifest.extra_name(STEP), [b"{}"])
    take(store, Term(2, "token 2", "node1:1", (1,)))
    continued = Fenced(Freezing(store.path, commits, lambda: save(store, OLD)), 2)
    assert retention.resume(continued, lambda step: step) == (STEP, ())


def test_the_nodes_that_continue_save_the_same_step_in_a_folder_of_their_own(store: DirectoryStore) -> None:
    with pytest.raises(CommitConflict):
        save(Fenced(Freezing(store.path, commits, lambda: save(continue_as(store, 2), NEW)), 1), OLD)
    assert manifest.steps(store) == [STEP]
    assert torch.equal(loaded(store), NEW["w"])


def test_a_part_that_it_writes_late_replaces_no_part_of_theirs(store: DirectoryStore) -> None:
    def is_part(verb: str, name: str) -> bool:
        return name.endswith(".safetensors")

    write(Fenced(Freezing(store.path, is_part, lambda: save(continue_as(store, 2), NEW)), 1), OLD)
    assert torch.equal(loaded(store), NEW["w"])
    retention.tidy(continue_as(store, 3), 2)
    assert manifest.steps(store) == [STEP]
    assert store.names(manifest.file_name(STEP)) == []


def test_of_two_snapshots_of_a_step_the_newer_term_counts_and_both_are_removed(store: DirectoryStore) -> None:
    save(Fenced(store, 1), OLD)
    save(continue_as(store, 2), NEW)
    assert manifest.terms_of(store, STEP) == [1, 2]
    assert torch.equal(loaded(store), NEW["w"])
    manifest.remove(Fenced(store, 2), STEP)
    assert store.names("step-") == []


def test_if_a_state_was_wrong_the_snapshots_of_all_terms_are_set_aside(store: DirectoryStore) -> None:
    save(Fenced(store, 1), OLD)
    newest = continue_as(store, 2)
    save(newest, NEW)
    retention.set_newer_aside(newest, STEP - 1, "a bit has flipped")
    assert manifest.steps(store) == []
    assert len(retention.aside(store)) == 2


def test_a_run_that_goes_on_with_one_node_saves_where_a_folder_was_closed(store: DirectoryStore) -> None:
    with pytest.raises(CommitConflict):
        save(Fenced(Freezing(store.path, commits, lambda: continue_as(store, 2)), 1), OLD)
    retention.tidy(store, 2)
    save(store, NEW)
    assert torch.equal(loaded(store), NEW["w"])
