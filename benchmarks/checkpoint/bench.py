"""Measure the cost of a save: stall, time until durable, training time lost. Run: python benchmarks/checkpoint/bench.py

A model is trained while its state (weights and AdamW moments) is saved with each method of arms.py (an arm), in turn and
again and again. The round of an arm is: some steps without a save; the save; steps until it is durable, and for a while
after; some steps without a save. "Stall" is the call, and the wait of the first optimizer step for staging. "Lost", the
figure that counts, is the time of the save and all those steps, minus the time of the steps without a save. "Rate" is
the speed of training while a save is in flight, as a share of its speed without. The first round, which warms up, is
reported separately.
"""

import argparse
import json
import logging
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from arms import Arm, Started, Tensors, bounds, ours, peers, remove

import holdfast
from holdfast.checkpoint import device, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.checkpoint.writer import overlapped

SIZES = {"cpu": (10, 2048, 16), "cuda": (24, 4096, 8192)}  # layers, width, batch
AROUND = {"cpu": 1.0, "cuda": 0.5}  # seconds of training without a save, before and after
AFTER = 0.5  # seconds of training after a save that still count as its time
DEFAULT = "dcp.async_save, default"
WRITE = "bound: raw write + fsync"


@dataclass
class Measured:
    """One save of one arm, in seconds; `rate` is None if no step ran while the save was in flight."""

    stall: float
    durable: float
    lost: float
    rate: float | None


class Training:
    """A stack of linear layers under AdamW; in bf16 on CUDA, in float32 on a CPU, which may lack bf16."""

    def __init__(self, device: str) -> None:
        layers, width, batch = SIZES[device]
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers)).to(device)
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-5, fused=True)
        self.x = torch.randn(batch, width, device=device)
        for _ in range(5):
            self.step()

    def step(self, fence: Callable[[], object] = lambda: None) -> None:
        """Train one step; call `fence` before the weights change."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            h = self.x
            for layer in self.layers:
                h = torch.relu(layer(h)) * 0.5
            loss = h.float().pow(2).mean()
        loss.backward()
        fence()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.wait()

    def wait(self) -> None:
        """Wait for the training stream only."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def tensors(self) -> Tensors:
        """Return the state to save."""
        found = {f"weight.{i}": value.detach() for i, value in enumerate(self.layers.parameters())}
        for i, state in enumerate(self.optimizer.state.values()):
            found |= {f"{name}.{i}": value for name, value in state.items() if name in ("exp_avg", "exp_avg_sq")}
        return found

    def seconds_a_step(self) -> float:
        """Return the time of a step without a save."""
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < AROUND[self.device.type]:
            self.step()
            steps += 1
        return (time.perf_counter() - began) / steps


def measure(training: Training, arm: Arm, place: Path) -> Measured:
    """Save once with one arm, and train meanwhile."""
    os.sync()
    before = training.seconds_a_step()
    waited = [0.0]
    began = time.perf_counter()
    started = arm(place)
    training.wait()
    called = time.perf_counter()
    durable = started.durable()
    steps = 0
    meanwhile: tuple[int, float] | None = None
    while durable is None or time.perf_counter() < max(durable, called) + AFTER:
        training.step(fenced(started, waited) if steps == 0 else lambda: None)
        steps += 1
        if durable is None and (durable := started.durable()) is not None:
            meanwhile = steps, time.perf_counter()
    elapsed = time.perf_counter() - began
    step = (before + training.seconds_a_step()) / 2
    rate = None if meanwhile is None else meanwhile[0] * step / (meanwhile[1] - called - waited[0])
    return Measured(called - began + waited[0], durable - began, elapsed - steps * step, rate)


def fenced(started: Started, waited: list[float]) -> Callable[[], None]:
    """Return a fence that adds the time training waits at it to `waited`."""

    def fence() -> None:
        began = time.perf_counter()
        started.staged()
        waited[0] += time.perf_counter() - began

    return fence


def no_save(place: Path) -> Started:
    """Save nothing, to show the figures of a free save and their noise."""
    return Started()


def rounds(
    training: Training, folder: Path, limit: float, most: int
) -> tuple[dict[str, list[Measured]], dict[str, str]]:
    """Measure every arm in turn, as often as there is time for; return the results, and the errors of failed arms."""
    tensors = training.tensors()
    known: dict[str, Arm] = {"no save": no_save, **bounds(tensors), **ours(tensors, folder), **peers(tensors)}
    # Compared arms follow each other closely, in case the machine has other load for a while.
    arms = {name: known[name] for name in (*(name for name in known if "copy" in name), "overlapped", WRITE, DEFAULT)}
    arms |= known
    results: dict[str, list[Measured]] = {name: [] for name in arms}
    failed: dict[str, str] = {}
    began = time.perf_counter()
    for number in range(most + 1):
        round_began = time.perf_counter()
        for name in reversed(arms) if number % 2 else arms:
            if name in failed:
                continue
            place = folder / "save"
            try:
                results[name].append(measure(training, arms[name], place))
            except BaseException as error:  # DCP's errors do not derive from Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            remove(place)
            print(f"round {number} {name}: {results[name][-1:] or failed.get(name)}", file=sys.stderr, flush=True)
        now = time.perf_counter()
        if number and now - began + now - round_began > limit:
            break
    return results, failed


def check(training: Training, folder: Path) -> bool:
    """Return True if the saved bits are those at the time of the call, although training continues at once."""
    tensors = dict(list(training.tensors().items())[::6])
    store = DirectoryStore(folder)
    writer = overlapped(store, keep_last=2)
    same = True
    for step in range(3):
        expected = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
        writer.save(step, tensors, {})
        for _ in range(3):
            training.step()
        writer.finished()
        if step == 2:
            writer.close()
            found = snapshot.load(store, step).tensors
            same = all(torch.equal(torch.as_tensor(found[name]), value) for name, value in expected.items())
    return same


def spread(values: list[float], places: int) -> str:
    """Format the median and the range."""
    middle, low, high = (f"{x:.{places}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def table(results: dict[str, list[Measured]], failed: dict[str, str]) -> str:
    """Return the table with the figures of every arm."""
    lines = [
        "| | stall ms | durable after s | rate meanwhile | **training time lost ms** | first stall ms | first lost ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, measured in results.items():
        if not measured:
            continue
        first, rest = measured[0], measured[1:] or measured
        writes = name != "no save" and "copy" not in name
        rates = [save.rate for save in rest if save.rate is not None]
        cells = [
            f"{name}{f' (failed at call {len(measured) + 1})' if name in failed else ''}",
            spread([save.stall * 1e3 for save in rest], 1),
            spread([save.durable for save in rest], 2) if writes else "",
            f"{statistics.median(rates):.0%}" if rates else "",
            spread([save.lost * 1e3 for save in rest], 0),
            f"{first.stall * 1e3:.0f}",
            f"{first.lost * 1e3:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


Figure = Callable[[Measured], float]
STALL: Figure = lambda save: save.stall  # noqa: E731 - a figure is a name for a field
DURABLE: Figure = lambda save: save.durable  # noqa: E731
LOST: Figure = lambda save: save.lost  # noqa: E731
Claim = tuple[str, Figure, str, float]
CLAIMS: dict[str, list[Claim]] = {
    "cpu": [
        ("stall", STALL, "bound: memory copy", 1.1),
        ("durable after", DURABLE, WRITE, 2.0),
        ("training time lost", LOST, DEFAULT, 0.5),
    ],
    "cuda": [("stall", STALL, DEFAULT, 1 / 50), ("training time lost", LOST, DEFAULT, 1 / 20)],
}


def claim(results: dict[str, list[Measured]], what: str, figure: Figure, other: str, most: float) -> dict[str, Any]:
    """Print and return whether overlapped takes at most the share `most` of `other`, by the median ratio of the rounds."""
    pairs = list(zip(results["overlapped"], results[other], strict=False))
    ratios = sorted(figure(a) / figure(b) for a, b in (pairs[1:] or pairs))
    median = statistics.median(ratios)
    print(
        f"- {what} of overlapped is {median:.3f} of {other} ({ratios[0]:.3f} to {ratios[-1]:.3f}), "
        f"{most:.3g} allowed: {'holds' if median <= most else 'DOES NOT HOLD'}"
    )
    return {"claim": what, "against": other, "allowed": most, "measured": ratios, "holds": median <= most}


def environment(device: str) -> str:
    """Return the versions and the machine of the measurement."""
    try:
        import torchsnapshot

        snapshot = torchsnapshot.__version__
    except ImportError:
        snapshot = "not installed"
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    return (
        f"holdfast {holdfast.__version__}, python {platform.python_version()}, torch {torch.__version__}, xxhash "
        f"{xxhash.VERSION}, torchsnapshot {snapshot}, Linux {platform.release().split('-')[0]}, {os.cpu_count()} cores, {where}"
    )


def join_a_group_of_one() -> None:
    """Create the process group that DCP's async_save needs, and the address and port for its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    """Measure, print the table, say which claims hold; exit with 1 if one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--folder", help="write into a temporary folder in this folder")
    parser.add_argument("--rounds", type=int, default=9, help="largest number of rounds, after one that warms up")
    parser.add_argument(
        "--seconds", type=float, default=240, help="start no round that would end after this many seconds"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    join_a_group_of_one()
    training = Training(options.device)
    size = sum(value.nbytes for value in training.tensors().values())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results, failed = rounds(training, Path(folder), options.seconds, options.rounds)
        exact = {"as it is": check(training, Path(folder) / "check")}
        if options.device == "cuda":
            device.SPARE = 2.0
            exact["without room for a clone"] = check(training, Path(folder) / "no-clone")
    print(f"state {size / 1e6:.0f} MB, a step {training.seconds_a_step() * 1e3:.1f} ms; {environment(options.device)}")
    claims = report(results, failed, CLAIMS[options.device])
    print(f"- overlapped saves the state of the call, bit by bit, while training goes on: {exact}")
    if options.json:
        rows = {name: [asdict(save) for save in measured] for name, measured in results.items()}
        about = {"environment": environment(options.device), "bytes": size, "failed": failed, "exact": exact}
        options.json.write_text(json.dumps({**about, "claims": claims, "rows": rows}, indent=1))
    sys.stdout.flush()
    for child in multiprocessing.active_children():  # DCP's process, which would complain about the end of this one
        child.kill()
    held = all(result["holds"] for result in claims) and all(exact.values())
    os._exit(0 if held else 1)  # without waiting for threads of a failed arm


def report(results: dict[str, list[Measured]], failed: dict[str, str], claims: list[Claim]) -> list[dict[str, Any]]:
    """Print the table and which claims hold."""
    print(f"{len(results['overlapped']) - 1} rounds after one that warmed up; median (min to max)\n")
    print(table(results, failed), "\n")
    for name, why in failed.items():
        print(f"- {name} failed at call {len(results[name]) + 1}: {why}")
    judged = [claim(results, *arguments) for arguments in claims]
    peers = [name for name in results if name.startswith("dcp.async") and len(results[name]) > 1]
    direct = "bound: raw write past the page cache"
    claim(results, "(no goal) durable after", DURABLE, direct, 2.0)
    claim(results, "(no goal) training time lost", LOST, min(peers, key=lambda name: lost(results[name])), 0.5)
    return judged


def lost(measured: list[Measured]) -> float:
    """Return the training time lost in the median round."""
    return statistics.median(save.lost for save in measured[1:])


if __name__ == "__main__":
    main()
