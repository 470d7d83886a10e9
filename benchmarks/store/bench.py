"""Measure the cost of a committed, verified snapshot beyond moving its bytes. Run: python benchmarks/store/bench.py [FOLDER]

Both sides move the same bytes in the same run, in turn. "raw write" is write and fsync of one file; "raw write, early"
lets the disk begin before all is written, as our store does, but hashes nothing; "committed write" is `snapshot.save`:
digest, fsync, rename, manifest, pointer, with every directory synced. "raw read" is readinto into new memory; "verified
read" is `snapshot.load`, tensors included. Dirty pages are flushed before every write. Reads are timed with the file in
the page cache (the harder case for a digest) and without.
"""

import io
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash

from holdfast.checkpoint import payload, snapshot
from holdfast.checkpoint.digest import CHUNK
from holdfast.checkpoint.store import DirectoryStore

MEGABYTES, TENSORS, REPEATS, SEED = 512, 64, 15, 0
CLAIMS = (("committed write", "raw write", 0.8), ("verified read", "raw read", 0.6))


def main() -> None:
    """Time all operations in turn, print the table and say whether the claims hold."""
    generator = torch.Generator().manual_seed(SEED)
    count = MEGABYTES * 1_000_000 // 4 // TENSORS
    state = {f"layer{i}.weight": torch.randn(count, generator=generator) for i in range(TENSORS)}
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        times = measure(Path(folder), state)
    report(times)
    held = [claim(times, *arguments) for arguments in CLAIMS]
    sys.exit(0 if all(held) else 1)


def measure(folder: Path, state: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return the seconds of every repeat; the order alternates, so that neither side always comes first."""
    raw, store = folder / "raw", DirectoryStore(folder / "store")
    kept = DirectoryStore(folder / "kept")
    snapshot.save(kept, 1, state, {})
    file = kept.path / "step-00000001" / "shard-00000-of-00001.safetensors"
    work: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "raw write": (lambda: clean(raw, store.path), lambda: raw_write(raw, state)),
        "raw write, early": (lambda: clean(raw, store.path), lambda: DirectoryStore(folder).put("raw", parts(state))),
        "committed write": (lambda: clean(raw, store.path), lambda: snapshot.save(store, 1, state, {})),
        "raw read": (lambda: warm(file), lambda: raw_read(file)),
        "verified read": (lambda: warm(file), lambda: snapshot.load(kept, 1)),
        "raw read, cold": (lambda: cold(file), lambda: raw_read(file)),
        "verified read, cold": (lambda: cold(file), lambda: snapshot.load(kept, 1)),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-1, REPEATS):  # the first round only warms up
        for name in sorted(work, reverse=repeat % 2 == 0):
            prepare, act = work[name]
            prepare()
            start = time.perf_counter()
            act()
            if repeat >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def raw_write(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Write the same bytes into one file, and sync it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for part in payload.encode(state):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
    os.close(descriptor)


def parts(state: dict[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yield the same bytes in chunks, without a digest."""
    for part in payload.encode(state):
        view = memoryview(part)
        yield from (view[i : i + CHUNK] for i in range(0, len(view), CHUNK))


def raw_read(path: Path) -> np.ndarray:
    """Read the same bytes into new memory."""
    with io.FileIO(path) as file:
        buffer = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
        filled = 0
        while count := file.readinto(buffer.data[filled:]):
            filled += count
    return buffer


def clean(*paths: Path) -> None:
    """Remove the files of earlier writes and flush the disk."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.sync()


def warm(path: Path) -> None:
    """Bring a file into the page cache."""
    raw_read(path)


def cold(path: Path) -> None:
    """Drop a file from the page cache."""
    with io.FileIO(path) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(times: dict[str, list[float]]) -> None:
    """Print the table and the versions."""
    print(f"state {MEGABYTES} MB in {TENSORS} tensors, {REPEATS} repeats in turn, seed {SEED}")
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, xxhash {xxhash.VERSION}"
        f", Linux {platform.release().split('-')[0]}, {os.cpu_count()} cores"
    )
    print(f"\n{'':22}{'median s':>10}{'min':>8}{'max':>8}{'MB/s':>8}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:22}{median:10.3f}{min(seconds):8.3f}{max(seconds):8.3f}{MEGABYTES / median:8.0f}")
    print()


def claim(times: dict[str, list[float]], ours: str, raw: str, least: float) -> bool:
    """Return True if holdfast reaches the share `least` of the raw speed, by the median ratio of the repeats."""
    ratios = [a / b for a, b in zip(times[raw], times[ours], strict=True)]
    ratio = statistics.median(ratios)
    low, high = statistics.quantiles(ratios, n=4)[::2]
    holds = ratio >= least
    print(f"{ours} at {ratio:.2f}x of {raw} (quartiles {low:.2f} to {high:.2f}), {least}x claimed:", end=" ")
    print("holds" if holds else "DOES NOT HOLD")
    return holds


if __name__ == "__main__":
    main()
