"""Measure planning and committing a sharded save of a 70 B model with many simulated ranks, beside DCP's planning.

Run: python benchmarks/planning/bench.py [--ranks 64 1024 16384] [--dcp 16 64]. One process plays one rank, and rank 0.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast.checkpoint import manifest, snapshot
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.sharding import ShardedTensor, Sharding, sizes
from holdfast.stall import Stall
from holdfast.train.state import rng
from holdfast.train.state.save import check_votes, divided_digest

LAYERS, WIDTH, HIDDEN, VOCABULARY, KEYS = 80, 8192, 28672, 128256, 1024
MOST = 1.0  # second of one core
REPEATS = 3


def model() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the parameters of a Llama model with 70 billion of them."""
    block = {
        **{f"attention.{name}": (rows, WIDTH) for name, rows in (("q", WIDTH), ("k", KEYS), ("v", KEYS), ("o", WIDTH))},
        **{"mlp.gate": (HIDDEN, WIDTH), "mlp.up": (HIDDEN, WIDTH), "mlp.down": (WIDTH, HIDDEN)},
        **{"norm1": (WIDTH,), "norm2": (WIDTH,)},
    }
    blocks = {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}
    return {"embedding": (VOCABULARY, WIDTH), **blocks, "norm": (WIDTH,), "head": (VOCABULARY, WIDTH)}


def layout(ranks: int) -> dict[str, ShardedTensor]:
    """Return how the parameters and both moments of AdamW are divided among the ranks by FSDP2."""
    rule = Sharding((ranks,), ((0, 0),))
    state: dict[str, ShardedTensor] = {}
    for number, (name, shape) in enumerate(model().items()):
        state[f"model/{name}"] = ShardedTensor("F32", shape, rule)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer/state/{number}/{moment}"] = ShardedTensor("F32", shape, rule)
        state[f"optimizer/state/{number}/step"] = ShardedTensor("F32", (), Sharding((ranks,)))
    return state


def seconds(work: Callable[[], Any]) -> list[float]:
    """Return the processor seconds that `work` took, for each repeat."""
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return taken


def plan(ranks: int) -> None:
    """Do what one rank does before it copies anything: the layout, its own parts, and the digest for its vote."""
    state = layout(ranks)
    for tensor in state.values():
        tensor.box(ranks // 2)
    divided_digest(state)


def votes_of(ranks: int) -> list[str]:
    """Return the votes of all ranks, as they arrive in the store."""
    own = json.dumps([rng.capture(), {}, None, False])
    division = divided_digest(layout(ranks))
    stall = dict.fromkeys(("waited", "snapshot"), 0.001)
    return [json.dumps([own, [840_000_000_000 // ranks, f"{rank:032x}"], division, stall, 0]) for rank in range(ranks)]


def commit(ranks: int, votes: list[str]) -> tuple[int, int]:
    """Do what rank 0 does with the votes: check them, and make the extra and the manifest; return their sizes."""
    ballots = [json.loads(vote) for vote in votes]
    owns, digests, _, stalls, _ = check_votes(ballots, 1000)
    generators = [json.loads(own)[0] for own in owns]
    max(Stall(**stall).waited for stall in stalls)
    draft = snapshot.draft(1000, {"generators": generators}, layout(ranks), world=ranks)
    record = manifest.encoded(draft.manifest([Digest(*digest) for digest in digests]))
    return len(record), len(draft.extra)


def restore(ranks: int, to: int) -> None:
    """Do what one rank does to find its parts in a snapshot of `ranks` ranks, restored with `to` ranks."""
    target = Sharding((to,), ((0, 0),))
    for tensor in layout(ranks).values():
        if tensor.shape:
            tensor.parts(target.box(tensor.shape, to // 2))


def dcp_plan(ranks: int) -> None:
    """Do what DCP's rank 0 does with the plans of all ranks, which it gathered: merge and validate them."""
    state = layout(ranks)
    properties = TensorProperties(dtype=torch.float32)
    plans = []
    for rank in range(ranks):
        items = []
        for name, tensor in state.items():
            box = tensor.box(rank)
            if box and sizes(box):
                offset = torch.Size([start for start, _ in box])
                chunk = ChunkStorageMetadata(offset, torch.Size(sizes(box)))
                data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(tensor.shape))
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    began = time.process_time()
    merged, metadata = create_default_global_save_plan(plans)
    assert _validate_global_plan(merged, metadata) in ([], True)  # a list of errors; before torch 2.13, a verdict
    dcp_seconds.append(time.process_time() - began)


dcp_seconds: list[float] = []


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> int:
    """Print the table, and say whether the claim holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--dcp", type=int, nargs="*", default=[16, 64], help="numbers of ranks for DCP's planning")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parameters = sum(int(torch.Size(shape).numel()) for shape in model().values())
    print(
        f"{parameters / 1e9:.1f} billion parameters in {len(model())} tensors, {len(layout(1))} tensors with AdamW's state; "
        f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| ranks | plan of one rank, s | votes and commit, s | restore to half the ranks, s | manifest, MB | extra, MB |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    slow = []
    for ranks in options.ranks:
        votes = votes_of(ranks)
        planned, committed = seconds(lambda ranks=ranks: plan(ranks)), seconds(lambda r=ranks, v=votes: commit(r, v))
        found = seconds(lambda ranks=ranks: restore(ranks, ranks // 2))
        record, extra = commit(ranks, votes)
        print(
            f"| {ranks:,} | {spread(planned)} | {spread(committed)} | {spread(found)} | {record / 1e6:.2f} | {extra / 1e6:.2f} |"
        )
        slow += [ranks] if max(statistics.median(planned), statistics.median(committed)) > MOST else []
    print("\n| ranks | DCP: merging and validating the plans of all ranks on rank 0, s |\n|---:|---:|")
    for ranks in options.dcp:
        dcp_plan(ranks)
        print(f"| {ranks:,} | {dcp_seconds[-1]:.2f} |", flush=True)
    print(f"\nat most {MOST:g} s of one core for a plan, and for the votes: {f'FAILS for {slow}' if slow else 'holds'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
