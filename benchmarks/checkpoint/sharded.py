"""Measure saves and restores of a model sharded with FSDP2 over 4 ranks, beside DCP's. Run: python sharded.py

The arms take turns on the same model, in the same processes: holdfast's overlapped writer, `dcp.async_save`,
`dcp.save` and, if it is installed, torch_checkpointing. A stall is the time that training waits: for the call, for the
copies that it has put into the stream of the device, and for the lock that torch_checkpointing needs around an
optimizer step. A restore is measured in new processes, with the same number of ranks and with another. Also measured:
the time until the state of a replicated (DDP) model is durable, divided among 4 ranks and written by rank 0 alone.

On CUDA all ranks share one GPU, where NCCL cannot connect them and gloo would take seconds for each step. So they train
without FSDP's collectives there: each rank computes on its own and steps with gradients that stay the same.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.checkpoint import manifest, snapshot, writer
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.store import DirectoryStore
from holdfast.stall import Stall
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import DividedState, read_parts

try:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError:
    CheckpointManager = None

OURS, ASYNC, BLOCKING = "holdfast, overlapped", "dcp.async_save", "dcp.save"
MANAGER = "torch_checkpointing"
DIVIDED, ALONE = "divided among the ranks", "by rank 0 alone"
CLAIMS = {"stall": 0.1, "durable": 1.0}  # at most this share of the others' asynchronous saves
PEAK = 1.25  # at most this multiple of a rank's shards is in memory during a restore, besides one tensor
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "holdfast.train.state.protected"]
Figures = dict[str, list[dict[str, float]]]


class Training:
    """A stack of linear layers with AdamW, sharded over all ranks, or the same on every rank."""

    def __init__(self, layers: int, width: int, device: str, *, sharded: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(device)
        if sharded:
            mesh = init_device_mesh(device, (dist.get_world_size(),))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.protected = Protected({"model": self.model, "optimizer": self.optimizer})
        self.lock: Callable[[], AbstractContextManager[Any]] = nullcontext  # around an optimizer step
        self.waited = 0.0  # seconds for this lock
        self._x = torch.randn(4, width, device=device)
        self._is_alone = sharded and device == "cuda"

    def step(self) -> None:
        if self._is_alone:
            self._compute_alone()
        else:
            self.model(self._x).pow(2).mean().backward()
        began = time.perf_counter()
        with self.lock():
            self.waited += time.perf_counter() - began
            self.optimizer.step()
        if not self._is_alone:
            self.optimizer.zero_grad()

    def _compute_alone(self) -> None:
        wide = self._x.expand(self._x.shape[1] // 4, *self._x.shape).flatten(0, 1)
        torch.mm(wide, wide)
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, 1e-3)

    def finish_kernels(self) -> None:
        """Wait for the kernels that training has launched; copies in other streams may continue."""
        if self._x.is_cuda:
            torch.cuda.current_stream().synchronize()


class Saver:
    """holdfast's overlapped writer with the votes of a run, which travel through the store of the process group."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()
        self._writer = writer.overlapped(DirectoryStore(folder), keep_last=1)
        self._prefix = str(folder)
        self.bytes = 0

    def save(self, step: int, state: DividedState, *, count: int | None = None) -> None:
        """Start a save; `count` is the number of ranks that write."""
        count = count or self.size
        self.bytes = sum(part.nbytes for part in state.parts.values())
        if self.rank < count:
            self._writer.save(step, state.parts, self._vote(step, state, count), rank=self.rank, count=count)

    def durable(self) -> float | None:
        """Return the seconds from the beginning of the last save until it was committed, on rank 0; None before that."""
        return next((saved.seconds for saved in self._writer.finished()), None)

    def close(self) -> None:
        self._writer.close()

    def _vote(self, step: int, state: DividedState, count: int) -> writer.Vote:
        def vote(shard: writer.WrittenShard) -> writer.Ballot | None:
            if self.rank:
                self._store.set(f"{self._prefix}/{step}/{self.rank}", json.dumps(asdict(shard.digest)))
                return None
            others = [json.loads(self._store.get(f"{self._prefix}/{step}/{rank}")) for rank in range(1, count)]
            draft = snapshot.draft(step, state.flat.extra, state.layout, world=count)
            return writer.Ballot(draft, [shard.digest, *(Digest(**other) for other in others)], Stall())

        return vote


def worst(value: float) -> float:
    """Return the largest of the ranks' values."""
    values = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float(values)


def measure(training: Training, start: Callable[[], object], durable: Callable[[], float | None]) -> dict[str, float]:
    """Return the longest stall of a rank, and the seconds until the save was durable, while training goes on."""
    training.finish_kernels()
    training.waited = 0.0
    dist.barrier()
    began = time.perf_counter()
    start()
    training.finish_kernels()
    stall = time.perf_counter() - began
    seconds = durable()
    while worst(float(seconds is None)):  # until every rank knows
        training.step()
        seconds = durable() if seconds is None else seconds
    return {"stall": worst(stall + training.waited), "durable": worst(seconds or 0.0)}


def save_rounds(training: Training, folder: Path, rounds: int) -> tuple[Figures, int]:
    """Save with each arm in turn; return the figures, and the bytes that this rank copied for holdfast."""
    figures: Figures = {OURS: [], ASYNC: [], BLOCKING: []}
    manager = _torch_checkpointing() if CheckpointManager else None
    if manager:
        figures[MANAGER] = []
    ours, rank = Saver(folder / "ours"), dist.get_rank()
    group = dist.new_group()  # DCP plans in a background thread, and must not mix with the collectives of training
    for number in range(rounds + 1):

        def save_ours(step: int = number) -> None:
            ours.save(step, training.protected.divide([], rank, dist.get_world_size()))

        figures[OURS].append(measure(training, save_ours, lambda: ours.durable() if rank == 0 else 0.0))
        for arm in (ASYNC, BLOCKING):
            model, optimizer = get_state_dict(training.model, training.optimizer)
            state = {"model": model, "optimizer": optimizer}
            place = folder / f"{arm}-{number}"
            save = dcp.async_save if arm == ASYNC else dcp.save
            figures[arm].append(
                _measure_call(training, lambda: save(state, checkpoint_id=place, process_group=group))  # noqa: B023
            )
        if manager:
            state = {name: thing.state_dict() for name, thing in training.protected.things.items()}
            training.lock = manager.lock
            figures[MANAGER].append(_measure_call(training, lambda: manager.save(str(folder / f"tc-{number}"), state)))  # noqa: B023
            training.lock = nullcontext
        dist.barrier()
        if rank == 0 and number < rounds:  # the last one is restored
            for place in folder.glob(f"*-{number}"):
                shutil.rmtree(place)
    dist.barrier()
    ours.close()
    if manager:
        manager.close()
    return figures, ours.bytes


def _torch_checkpointing() -> Any:
    # Its direct I/O writes buffers that are not aligned, which some filesystems refuse. Its processes import torch, which
    # takes longer than the default of 30 s if all ranks start them on few cores.
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=300)
    return CheckpointManager(
        CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(process_config=process),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )


def _measure_call(training: Training, save: Callable[[], Any]) -> dict[str, float]:
    """Return the figures of `save`, which returns a future if it only starts the save."""
    futures: list[Any] = []
    ended: list[float] = []
    began = time.perf_counter()

    def start() -> None:
        if hasattr(result := save(), "done"):
            futures.append(result)
            result.add_done_callback(lambda _: ended.append(time.perf_counter()))
        else:
            ended.append(time.perf_counter())

    def durable() -> float | None:
        if not ended:
            return None
        for future in futures:
            future.result()
        return ended[0] - began

    return measure(training, start, durable)


def replicated_rounds(training: Training, folder: Path, rounds: int) -> Figures:
    """Save a replicated model, divided among the ranks and by rank 0 alone, in turn."""
    figures: Figures = {DIVIDED: [], ALONE: []}
    rank, size = dist.get_rank(), dist.get_world_size()
    savers = {arm: Saver(folder / arm.replace(" ", "-")) for arm in figures}
    for number in range(rounds + 1):
        for arm, count in ((DIVIDED, size), (ALONE, 1)):

            def save(step: int = number, arm: str = arm, count: int = count) -> None:
                state = training.protected.divide([training.model], rank if count > 1 else 0, count)
                savers[arm].save(step, state, count=count)

            waits = rank == 0
            figures[arm].append(measure(training, save, lambda arm=arm, w=waits: savers[arm].durable() if w else 0.0))
    dist.barrier()
    for saver in savers.values():
        saver.close()
    return figures


def restore(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Restore a new model from both kinds of saves; return the seconds, and the peak memory over that of the state."""
    rank, figures = dist.get_rank(), {}
    for arm in ("ours", "dcp"):
        training = Training(options.layers, options.width, options.device, sharded=True)
        dist.barrier()
        before = _reset_peak(options.device)
        began = time.perf_counter()
        if arm == "ours":
            store = DirectoryStore(folder / "ours")
            reader = SnapshotReader(store, max(manifest.steps(store)))
            held = flatten(training.protected.capture()).tensors
            tensors = read_parts(reader, held, training.protected.parameter_of, rank)
            training.protected.restore(unflatten(tensors, reader.extra))
        else:
            model, optimizer = get_state_dict(training.model, training.optimizer)
            state = {"model": model, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=max(folder.glob(f"{BLOCKING}-*")))
            set_state_dict(
                training.model,
                training.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        figures[f"{arm} restore"] = worst(time.perf_counter() - began)
        figures[f"{arm} grown"] = worst(_peak(options.device) - before)
        del training
    return figures


def _reset_peak(device: str) -> float:
    """Return the bytes in use, of the GPU by torch or of this process; the peak is counted from now on."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.memory_allocated())
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS") - _memory("RssFile")


def _peak(device: str) -> float:
    """Return the peak of what `_reset_peak` counts; pages of libraries, which a restore may touch first, are left out."""
    return float(torch.cuda.max_memory_allocated()) if device == "cuda" else _memory("VmHWM") - _memory("RssFile")


def _memory(what: str) -> float:
    """Return the memory of this process in bytes: resident (VmRSS), its peak (VmHWM) or mapped files (RssFile)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return float(lines[what].split()[0]) * 1024


def worker(rank: int, size: int, port: int, what: str, options: argparse.Namespace, result: str) -> None:
    """Run one part of the measurement in `size` processes; rank 0 writes the figures."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    folder = Path(options.folder)
    if what == "save":
        training = Training(options.layers, options.width, options.device, sharded=True)
        training.step()
        figures, copied = save_rounds(training, folder, options.rounds)
        found: Any = {"figures": figures, "copied": copied}
    elif what == "replicated":
        training = Training(options.layers, options.width, options.device, sharded=False)
        training.step()
        found = {"figures": replicated_rounds(training, folder, options.rounds)}
    else:
        found = restore(folder, options)
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, what: str, options: argparse.Namespace) -> Any:
    result = f"{options.folder}/{what}-{size}.json"
    port = 29500 + os.getpid() % 1000 + len(list(Path(options.folder).glob("*.json")))
    method = "spawn" if options.device == "cuda" else "forkserver"  # CUDA may not be touched before a fork
    mp.start_processes(worker, (size, port, what, options, result), nprocs=size, start_method=method)
    return json.loads(Path(result).read_text())


def spread(values: list[float], scale: float = 1.0) -> str:
    return f"{scale * statistics.median(values):.3g} ({scale * min(values):.3g} to {scale * max(values):.3g})"


def main() -> int:
    """Measure, print the tables, and say which claims hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="all ranks share one GPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--place", help="write into a temporary folder in this folder")
    parser.add_argument("--only-saves", action="store_true", help="leave out restores and the replicated model")
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(PRELOADED)  # new processes, which need not import torch
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        options.folder = folder
        saved, restored = run(options.ranks, "save", options), {}
        replicated: Any = {"figures": {}}
        if not options.only_saves:
            sizes = (options.ranks, options.ranks // 2, options.ranks - 1)
            restored = {size: run(size, "restore", options) for size in sizes}
            replicated = run(options.ranks, "replicated", options)
    peaks = {
        size: {arm: peak(options, figures, size, arm) for arm in ("ours", "dcp")} for size, figures in restored.items()
    }
    report(options, saved, restored, replicated, peaks)
    return judge(saved["figures"], [both["ours"] for both in peaks.values()])


def peak(options: argparse.Namespace, figures: dict[str, float], size: int, arm: str) -> float:
    """Return the peak memory of a restore with `size` ranks without one tensor, as a multiple of a rank's shards.

    The weights are in memory before; the rest of the state is what has grown."""
    shards, tensor = 12 * options.layers * options.width**2 / size, 4 * options.width**2
    return (figures[f"{arm} grown"] + shards / 3 - tensor) / shards


def report(
    options: argparse.Namespace,
    saved: Any,
    restored: dict[int, Any],
    replicated: Any,
    peaks: dict[int, dict[str, float]],
) -> None:
    state = 12 * options.layers * options.width**2
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(
        f"{device}, state {state / 1e6:.0f} MB over {options.ranks} ranks, {saved['copied'] / 1e6:.0f} MB copied by rank 0; python "
        f"{platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.rounds} "
        "rounds after one that warmed up, median (min to max)\n"
    )
    print("| save | stall of the slowest rank, ms | durable after, s |\n|---|---:|---:|")
    for arm, rows in {**saved["figures"], **replicated["figures"]}.items():
        name = f"DDP, {arm}" if arm in (DIVIDED, ALONE) else arm
        print(
            f"| {name} | {spread([row['stall'] for row in rows[1:]], 1e3)} | {spread([row['durable'] for row in rows[1:]])} |"
        )
    if CheckpointManager is None:
        print("\ntorch_checkpointing is not installed, and was left out.")
    if not restored:
        print()
        return
    print(
        f"\n| restore of a save of {options.ranks} ranks | holdfast, s | dcp.load, s | ratio | peak memory without one tensor, x of "
        "the rank's shards | dcp.load's |\n|---|---:|---:|---:|---:|---:|"
    )
    for size, figures in restored.items():
        ours, theirs = figures["ours restore"], figures["dcp restore"]
        memory = f"{peaks[size]['ours']:.2f} | {peaks[size]['dcp']:.2f}"
        print(f"| with {size} ranks | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {memory} |")
    print()


def judge(figures: Figures, peaks: list[float]) -> int:
    """Print which claims hold, and return the exit status: 0 if all hold."""
    failed = 0
    for arm in [arm for arm in (ASYNC, MANAGER) if arm in figures]:
        for what, most in CLAIMS.items():
            pairs = zip(figures[OURS][1:], figures[arm][1:], strict=True)
            ratios = sorted(ours[what] / theirs[what] for ours, theirs in pairs)
            holds = statistics.median(ratios) <= most
            failed += not holds
            print(f"- {what}: {spread(ratios)} of {arm}, {most:g} allowed: {'holds' if holds else 'DOES NOT HOLD'}")
    if peaks:
        holds = max(peaks) <= PEAK
        failed += not holds
        print(
            f"- peak memory: {max(peaks):.2f} of the shards, {PEAK:g} allowed: {'holds' if holds else 'DOES NOT HOLD'}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
