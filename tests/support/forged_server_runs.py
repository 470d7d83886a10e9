"""Lies about runs of the parameter server: each changes one thing that matters in the history of a correct run."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from fake_server_runs import PlayedRun
from holdfast.audit.verdicts import Finding, audit_files
from holdfast.blocks.partition_map import PartitionMap
from holdfast.events import (
    Applied,
    Chosen,
    Commit,
    Done,
    Dropped,
    Event,
    Iterate,
    Joined,
    Lost,
    Malformed,
    Moved,
    Open,
    Pushed,
    Restored,
    Serve,
    Struck,
    What,
)
from holdfast.sampler.digest import Samples

Files: TypeAlias = dict[str, list[Event]]
Place: TypeAlias = tuple[str, int]  # a file, and a line of it
Forgery: TypeAlias = Callable[[random.Random, PlayedRun, Files], Files | None]  # None: nothing to change
FORGERIES: dict[str, Forgery] = {}


def forgery(make: Forgery) -> Forgery:
    FORGERIES[make.__name__.replace("_", " ")] = make
    return make


def found(files: Files) -> tuple[Finding, ...]:
    return audit_files((name, event) for name in sorted(files) for event in files[name])


def because(files: Files) -> str:
    return "\n".join(f"{each.check}: {each.because}" for each in found(files) if each.verdict != "pass")


# What a forger knows, and does.


def places(files: Files, kind: Any, which: Callable[[Any], bool] = lambda what: True, who: str = "") -> list[Place]:
    return [
        (name, line)
        for name, events in sorted(files.items())
        for line, event in enumerate(events)
        if name.startswith(who) and isinstance(event.what, kind) and which(event.what)
    ]


def pick(rng: random.Random, several: list[Place]) -> Place | None:
    return rng.choice(several) if several else None


def what_at(files: Files, place: Place) -> Any:
    return files[place[0]][place[1]].what


def put(files: Files, place: Place, what: What) -> Files:
    files[place[0]][place[1]] = files[place[0]][place[1]]._replace(what=what)
    return files


def without(files: Files, *several: Place) -> Files:
    for name, line in sorted(several, reverse=True):
        del files[name][line]
    return files


def doubled(files: Files, place: Place) -> Files:
    files[place[0]].insert(place[1], files[place[0]][place[1]])
    return files


def when(what: Applied | Pushed | Dropped) -> tuple[int, int]:
    return what.iteration, what.round


def dropped_rounds(files: Files) -> set[tuple[int, int]]:
    return {when(what_at(files, place)) for place in places(files, Dropped)}


def more_or_less(blocks: Samples) -> Samples:
    return Samples(blocks.count, blocks.digest[::-1]) if blocks.digest != blocks.digest[::-1] else Samples.of([77])


@forgery
def a_round_not_applied(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Applied, lambda what: when(what) not in dropped_rounds(files)))
    return place and without(files, place)


@forgery
def a_round_applied_twice(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Applied))
    return place and doubled(files, place)


@forgery
def a_round_applied_to_other_blocks(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Applied))
    return place and put(files, place, (it := what_at(files, place))._replace(blocks=more_or_less(it.blocks)))


@forgery
def a_round_applied_by_another_node(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    nodes = [who for who in files if who.startswith("node-")]
    place = pick(rng, places(files, Applied, lambda what: when(what) not in dropped_rounds(files)))
    if place is None or len(nodes) < 2:
        return None
    other = rng.choice([node for node in nodes if node != place[0]])
    files[other].append(files[place[0]][place[1]]._replace(who=other))
    return without(files, place)


@forgery
def a_round_applied_by_a_map_to_come(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    last = max((what_at(files, place).version for place in places(files, Restored)), default=0)
    place = pick(rng, places(files, Applied, lambda what: what.version < last - 1))
    return place and put(files, place, what_at(files, place)._replace(version=last + 50))


@forgery
def a_push_left_out(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Applied, lambda what: what.parts))
    return place and put(files, place, (it := what_at(files, place))._replace(parts=it.parts[1:]))


@forgery
def a_push_applied_twice(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Applied, lambda what: what.parts))
    return place and put(files, place, (it := what_at(files, place))._replace(parts=[*it.parts, it.parts[0]]))


@forgery
def a_push_that_never_was(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    often = Counter((*when(what_at(files, place)), what_at(files, place).part) for place in places(files, Pushed))
    place = pick(rng, places(files, Pushed, lambda what: often[(*when(what), what.part)] == 1))
    return place and without(files, place)


@forgery
def a_push_to_fewer_nodes(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    often = Counter((*when(what_at(files, place)), what_at(files, place).part) for place in places(files, Pushed))
    quiet = dropped_rounds(files)
    place = pick(
        rng,
        places(files, Pushed, lambda it: it.nodes and often[(*when(it), it.part)] == 1 and when(it) not in quiet),
    )
    return place and put(files, place, (it := what_at(files, place))._replace(nodes=it.nodes[1:]))


def one_push(rng: random.Random, files: Files, which: Callable[[Any], bool]) -> Place | None:
    """A push that was made once, in a round in which nothing was dropped."""
    often = Counter((*when(what_at(files, place)), what_at(files, place).part) for place in places(files, Pushed))
    quiet = dropped_rounds(files)
    once = places(files, Pushed, lambda it: often[(*when(it), it.part)] == 1 and when(it) not in quiet)
    return pick(rng, [place for place in once if which(what_at(files, place))])


@forgery
def a_push_of_more_blocks_than_its_nodes_hold(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = one_push(rng, files, lambda what: what.nodes)
    much = Samples(run.plan.blocks + 1, "0" * 32)
    return place and put(files, place, what_at(files, place)._replace(blocks=much))


@forgery
def a_push_of_no_blocks_to_nodes(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = one_push(rng, files, lambda what: what.nodes)
    return place and put(files, place, what_at(files, place)._replace(blocks=Samples()))


@forgery
def a_push_of_other_blocks_than_all(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = one_push(rng, files, lambda what: what.blocks.count == run.plan.blocks)
    return place and put(files, place, (it := what_at(files, place))._replace(blocks=more_or_less(it.blocks)))


@forgery
def a_push_after_the_end(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Pushed))
    done = what_at(files, places(files, Done)[-1]).step
    if place is None:
        return None
    late = what_at(files, place)._replace(iteration=done + rng.randint(0, 3))
    files[place[0]].append(files[place[0]][-1]._replace(what=late))
    return files


@forgery
def rounds_applied_in_another_order(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    pairs = []
    for node in sorted({who for who, _ in places(files, Applied)}):
        told = places(files, Applied, who=node)
        pairs += [
            (a, b) for a, b in pairwise(told) if a[0] == b[0] and when(what_at(files, a)) != when(what_at(files, b))
        ]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    first, second = what_at(files, one), what_at(files, other)
    return put(put(files, one, second), other, first)


@forgery
def somebody_killed_who_never_was(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Iterate))
    if place is None:
        return None
    whom = rng.choice([("node", 77), ("worker", 77), ("controller", 1), ("king", 0)])
    struck = Struck(what_at(files, place).iteration, whom[0], [whom[1]])
    files["controller"].insert(place[1], files["controller"][place[1]]._replace(what=struck))
    return files


@forgery
def a_part_taken_over_from_the_living(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    workers = [who for who in files if who.startswith("worker-")]
    lost = {what_at(files, place).number for place in places(files, Lost, lambda what: what.kind == "worker")}
    own = [place for place in places(files, Pushed) if place[0] == f"worker-{what_at(files, place).part}"]
    place = pick(rng, [place for place in own if what_at(files, place).part not in lost])
    if place is None or len(workers) < 2:
        return None
    other = rng.choice([worker for worker in workers if worker != place[0]])
    files[other].append(files[place[0]][place[1]]._replace(who=other))
    return without(files, place)


@forgery
def dropped_pushes_kept_quiet(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    reached: defaultdict[tuple[int, int], int] = defaultdict(int)
    for place in places(files, Applied):
        reached[when(what_at(files, place))] += what_at(files, place).blocks.count
    found = pick(rng, places(files, Dropped, lambda what: reached[when(what)] < run.plan.blocks))
    return found and without(files, found)


@forgery
def other_blocks_dropped(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Dropped))
    return place and put(files, place, (it := what_at(files, place))._replace(blocks=more_or_less(it.blocks)))


@forgery
def a_round_dropped_that_was_not(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Iterate))
    if place is None:
        return None
    what = Dropped(what_at(files, place).iteration, 0, range(run.plan.workers), Samples.of([0]))
    files[place[0]].insert(place[1], files[place[0]][place[1]]._replace(what=what))
    lone = Counter(what_at(files, each).iteration for each in places(files, Dropped))[what.iteration] == 1
    return files if lone else None


def lone_losses(files: Files) -> list[Place]:
    """Losses of nodes while no other block was lost: of others, blocks may be told that had not come back yet."""
    often = Counter(what_at(files, place).version for place in places(files, Lost, lambda what: what.blocks))
    return places(files, Lost, lambda what: what.blocks and often[what.version] == 1)


@forgery
def a_loss_kept_quiet(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, lone_losses(files))
    return place and without(files, place)


@forgery
def a_lost_block_kept_quiet(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, lone_losses(files))
    return place and put(files, place, (it := what_at(files, place))._replace(blocks=it.blocks[1:]))


@forgery
def a_block_lost_that_another_holds(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, [each for each in lone_losses(files) if len(what_at(files, each).blocks) < run.plan.blocks])
    if place is None:
        return None
    it = what_at(files, place)
    return put(files, place, it._replace(blocks=[*it.blocks, min(set(range(run.plan.blocks)) - set(it.blocks))]))


@forgery
def a_block_that_did_not_come_back(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    used = {(place[0], what_at(files, place).version) for place in places(files, Applied)}
    place = pick(rng, places(files, Restored, lambda it: (f"node-{it.node}", it.version) in used, who="controller"))
    return place and without(files, place, *_same(files, place))


@forgery
def a_save_that_never_was(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Restored, who="controller"))
    if place is None:
        return None
    saved_at = list(what_at(files, place).saved_at)
    saved_at[rng.randrange(len(saved_at))] += rng.choice([1, 2, 100])
    return _in_both(files, place, saved_at=saved_at)


@forgery
def an_older_save(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Restored, lambda what: max(what.saved_at) > 0, who="controller"))
    return place and _in_both(files, place, saved_at=[0] * len(what_at(files, place).saved_at))


@forgery
def a_node_that_restored_something_else(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Restored, who="node"))
    return place and put(files, place, (it := what_at(files, place))._replace(blocks=[*it.blocks[1:], 99]))


@forgery
def another_owner(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    """A block came back to another node, as all say; but rounds were applied to it where it was."""
    for place in places(files, Restored, who="controller"):
        one = what_at(files, place)
        used = places(files, Applied, lambda what, v=one.version: what.version == v, who=f"node-{one.node}")
        others = [
            each
            for each in places(files, Restored, lambda what, v=one.version: what.version == v, who="controller")
            if each != place
        ]
        if used and others:
            two = what_at(files, others[0])
            _in_both(files, others[0], blocks=[*two.blocks, one.blocks[0]], saved_at=[*two.saved_at, one.saved_at[0]])
            return _in_both(files, place, blocks=one.blocks[1:], saved_at=one.saved_at[1:])
    return None


def _same(files: Files, place: Place) -> list[Place]:
    """The node's own line of what the controller tells."""
    it = what_at(files, place)
    return places(files, Restored, lambda what: what.version == it.version, who=f"node-{it.node}")


def _in_both(files: Files, place: Place, **changed: Any) -> Files:
    for each in (place, *_same(files, place)):
        put(files, each, what_at(files, each)._replace(**changed))
    return files


@forgery
def a_commit_with_other_blocks(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Commit, lambda what: len(what.blocks) > 1 and what.step))
    return place and put(files, place, (it := what_at(files, place))._replace(blocks=it.blocks[1:]))


@forgery
def a_commit_of_nothing_chosen(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Commit, lambda what: what.step))
    return place and put(files, place, what_at(files, place)._replace(step=1000))


@forgery
def a_commit_kept_quiet(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    if places(files, Lost):
        return None
    place = pick(rng, places(files, Commit, lambda what: what.blocks))
    return place and without(files, place)


@forgery
def a_commit_that_tells_no_blocks(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Commit, lambda what: what.step and what.blocks))
    return place and put(files, place, what_at(files, place)._replace(blocks=()))


@forgery
def a_choice_of_other_blocks(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Chosen, who="controller"))
    return place and put(files, place, (it := what_at(files, place))._replace(blocks=more_or_less(it.blocks)))


@forgery
def a_choice_that_no_node_made(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    if places(files, Lost):
        return None
    place = pick(rng, places(files, Chosen, who="node"))
    return place and without(files, place)


@forgery
def a_choice_kept_quiet(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    if places(files, Serve, lambda what: what.attempt):
        return None
    place = pick(rng, places(files, Chosen, who="controller"))
    return place and without(files, place)


@forgery
def an_iteration_left_out(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Iterate))
    return place and without(files, place)


@forgery
def an_iteration_told_twice(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Iterate))
    return place and doubled(files, place)


@forgery
def gone_on_beyond_the_criterion(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Iterate)[:-1])
    return place and put(files, place, what_at(files, place)._replace(loss=0.0))


@forgery
def ended_above_the_criterion(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    last = places(files, Iterate)[-1]
    if what_at(files, last).iteration + 1 == run.plan.iterations:
        return None
    return put(files, last, what_at(files, last)._replace(loss=9.0))


@forgery
def no_end(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    return without(files, *places(files, Done))


@forgery
def another_end(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    (place,) = places(files, Done)
    return put(files, place, what_at(files, place)._replace(step=what_at(files, place).step + 1))


@forgery
def another_seed(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    first = places(files, Commit)[0][1]
    lost = {each.what.number for each in files["controller"][:first] if isinstance(each.what, Lost)}
    nodes = [node for node in range(run.plan.nodes) if node not in lost]
    drawn = [
        PartitionMap.random(run.plan.blocks, nodes, np.random.default_rng((seed, 0))).owners
        for seed in (run.plan.seed, run.plan.seed + 1)
    ]
    if np.array_equal(*drawn):
        return None
    for place in places(files, Serve):
        put(files, place, what_at(files, place)._replace(seed=run.plan.seed + 1))
    return files


@forgery
def another_plan_in_a_later_life(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Serve, lambda what: what.attempt))
    return place and put(files, place, what_at(files, place)._replace(workload="another"))


@forgery
def a_life_lived_twice(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Serve))
    return place and doubled(files, place)


@forgery
def a_move_kept_quiet(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    """It would show in the next round; no round may follow before the blocks are lost."""
    used = {what_at(files, place).version for place in places(files, Applied)}
    place = pick(rng, places(files, Moved, lambda what: what.version in used))
    return place and without(files, place)


@forgery
def a_move_of_blocks_of_another(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Moved))
    return place and put(files, place, (it := what_at(files, place))._replace(source=it.source + 50))


@forgery
def a_node_that_never_joined(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Joined, lambda what: len(files[f"{what.kind}-{what.number}"]) > 1))
    return place and without(files, place)


@forgery
def no_history_of_a_member(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    first = {
        f"{kind}-{n}" for kind, count in (("node", run.plan.nodes), ("worker", run.plan.workers)) for n in range(count)
    }
    del files[rng.choice(sorted(first & set(files)))]
    return files


@forgery
def no_history_of_the_controller(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    del files["controller"]
    return files


@forgery
def a_line_in_the_file_of_another(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Applied))
    if place is None:
        return None
    files["worker-0"].append(files[place[0]][place[1]])
    return without(files, place)


@forgery
def a_line_that_lacks_something(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    place = pick(rng, places(files, Applied))
    return place and put(files, place, Malformed("applied", {}, "it lacks blocks"))


@forgery
def a_rank_among_them(rng: random.Random, run: PlayedRun, files: Files) -> Files | None:
    files["rank-0"] = [Event(0.0, "rank-0", Open(2))]
    return files
