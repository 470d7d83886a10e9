"""Write the folded history of a large job by docs/formats.md, with NumPy and without the code that folds histories.

Only the plan of the samples is holdfast's: the digests of what was trained must be those that it gives.
"""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan

NODE = 16  # ranks
CHUNK = 8192  # steps of a segment
LINE = 380  # bytes of the line of a step
DATE = (1980, 1, 1, 0, 0, 0)
WORD = 1 << 64


def write(history: Path, ranks: int, steps: int, per_rank: int = 1, seed: int = 1) -> int:
    """Write the history of `ranks` ranks that trained `steps` steps of `per_rank` samples each; return its bytes."""
    rng = np.random.default_rng(seed)
    batch = ranks * per_rank
    plan = SamplePlan(samples=batch * steps, batch=batch, epochs=1, seed=seed)
    heads = {rank: head(rank, ranks, plan) for rank in range(ranks)}
    (history / "segments").mkdir(parents=True)
    ends = dict.fromkeys(range(ranks), 0)
    number = 0
    for first in range(0, steps, CHUNK):
        count = min(CHUNK, steps - first)
        shared = rng.integers(1, WORD, count, np.uint64)
        for node in range(0, ranks, NODE):
            number += 1
            group = range(node, min(ranks, node + NODE))
            name = f"{number:06d}-rank-{group[0]}-to-{group[-1]}.npz"
            data = segment(rng, plan, ranks, group, first, count, shared, heads, ends)
            (history / "segments" / name).write_bytes(data)
    for rank in range(ranks):
        tail = [{"event": "commit", "attempt": 1, "step": steps, "bytes": 1, "state": "c"}] if rank == 0 else []
        tail.append({"event": "done", "attempt": 1, "step": steps})
        with (history / f"rank-{rank}.jsonl").open("wb") as file:
            file.write(heads[rank][0])
            file.seek(ends[rank])
            file.writelines(text(rank, line) for line in tail)
    return sum(min(path.stat().st_size, path.stat().st_blocks * 512) for path in history.rglob("*") if path.is_file())


def head(rank: int, ranks: int, plan: SamplePlan) -> list[bytes]:
    """Return the lines of a rank before its first step."""
    how = {"samples": plan.samples, "batch": plan.batch, "epochs": 1, "seed": plan.seed, "save_every": 1000}
    return [
        text(rank, {"event": "open", "version": 2}),
        text(rank, {"event": "attempt", "attempt": 1, "world": ranks, "rank": rank, "pid": 1}),
        text(rank, {"event": "plan", "attempt": 1, **how, "writer": "overlapped", "config": "c", "data": "d"}),
        text(
            rank,
            {"event": "recover", "attempt": 1, "restored": None, "epoch": 0, "cursor": 0, "rng": "keyed", "seconds": 1},
        ),
    ]


def text(rank: int, fields: dict[str, Any]) -> bytes:
    """Return a line of the file of a rank."""
    return json.dumps({"event": fields["event"], "time": 1.7e9, "who": f"rank-{rank}", **fields}).encode() + b"\n"


def segment(
    rng: np.random.Generator,
    plan: SamplePlan,
    ranks: int,
    group: range,
    first: int,
    count: int,
    shared: NDArray[np.uint64],
    heads: dict[int, list[bytes]],
    ends: dict[int, int],
) -> bytes:
    """Return the bytes of the segment of the ranks in `group` with `count` steps from step `first` on."""
    shape = len(group), count
    loss = rng.random(shape, np.float32).view(np.uint32).astype(np.uint64)
    data, compute = rng.integers(100, 180, shape, np.uint64), rng.integers(200_000, 201_000, shape, np.uint64)
    micros = np.cumsum(data + compute + rng.integers(0, 50, shape, np.uint64), axis=1) + np.uint64(
        1_700_000_000_000_000
    )
    windows = plan.windows(
        np.arange(first, first + count), range(group[0] * plan.batch // ranks, (group[-1] + 1) * plan.batch // ranks)
    )
    each = plan.batch // ranks
    sums = [Samples.sums(windows[:, i * each : (i + 1) * each]).astype("<u8") for i in range(len(group))]
    proofs = np.array(
        [[xxhash.xxh3_64_intdigest(s[at : at + 256].tobytes()) for at in range(0, count, 256)] for s in sums], np.uint64
    )
    one = np.full((1, count), 1, np.uint64)
    columns = {
        "time": ("micro", micros, True),
        "epoch": ("whole", 0 * one, False),
        "cursor": ("whole", np.arange(first, first + count, dtype=np.uint64)[None], True),
        "count": ("whole", each * one, False),
        "data": ("micro", data, False),
        "compute": ("micro", compute, False),
        "stall": ("micro", 0 * one, False),
        "device": ("whole", one, False),
        "has_state": ("whole", one, False),
        "shared": ("words", shared[None], False),
        "own": ("words", 0x2D06800538D394C2 * one, False),
        "reduced": ("whole", one, False),
        "held": ("whole", 0 * one, False),
        "stepped": ("whole", one, False),
        "has_loss": ("whole", one, False),
        "loss": ("float32", loss, False),
        "proofs": ("words", proofs, False),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        described = {name: add(archive, f"0/{name}.npy", *column) for name, column in columns.items()}
        parts, texts = [], b""
        for row, rank in enumerate(group):
            lines = heads[rank] if first == 0 else []
            start = ends[rank]
            ends[rank] += sum(map(len, lines)) + LINE * count
            at = texts.count(b"\n")
            texts += b"".join(lines)
            parts.append(
                {"who": f"rank-{rank}", "start": start, "end": ends[rank], "line": first + 1 + 4 * (first > 0)}
                | {"lines": count + len(lines), "file": xxhash.xxh3_64_hexdigest(heads[rank][0]), "plan": None}
                | {"rows": [[0, row]], "texts": [at, at + len(lines)]}
            )
        save(archive, "texts.npy", np.frombuffer(texts, np.uint8))
        save(archive, "places.npy", np.tile(np.arange(4), len(group)) if first == 0 else np.zeros(0, np.int64))
        panel = {"attempt": 1, "world": ranks, "first": first, "phase": [0, plan.samples, plan.batch, plan.seed, 1]}
        panel |= {
            "rows": [[f"rank-{rank}", rank, count] for rank in group],
            "planned": [True] * len(group),
            "columns": described,
        }
        archive.writestr(
            zipfile.ZipInfo("header.json", DATE), json.dumps({"version": 1, "parts": parts, "panels": [panel]})
        )
        archive.comment = b"-" * 32
    body = buffer.getvalue()[:-32]
    return body + xxhash.xxh3_128_hexdigest(body).encode()


def add(archive: zipfile.ZipFile, name: str, kind: str, words: NDArray[np.uint64], differ: bool) -> dict[str, Any]:
    """Add a column to `archive`, as differences if `differ`; return its description."""
    described: dict[str, Any] = {"kind": kind, "shape": list(words.shape)}
    if differ:
        described["first"] = words[:, 0].tolist()
        words = np.diff(words, axis=1)
    base = words.min()
    width = (int((words - base).max()).bit_length() + 7) // 8
    if width:
        save(
            archive, name, np.ascontiguousarray((words - base).astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)
        )
    return described | {"base": int(base), "bytes": width}


def save(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    """Add an array to `archive`."""
    member = io.BytesIO()
    np.save(member, array, allow_pickle=False)
    archive.writestr(zipfile.ZipInfo(name, DATE), member.getvalue(), zipfile.ZIP_DEFLATED)
