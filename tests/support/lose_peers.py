"""Loses a peer again and again, and prints the number of threads and open files after each loss as JSON.

Run: python lose_peers.py LOSSES. This process is rank 0 of two; each rank 1 is a child that dies during a collective.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # they are public

from holdfast.distributed import gloo_link
from holdfast.distributed.gloo_link import GroupBroken, Link


def start_peer(port: int, number: int) -> int:
    """Fork rank 1, which takes part in one collective and is killed in the next."""
    if pid := os.fork():
        return pid
    link = Link()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    link.connect(lambda: PrefixStore(str(number), store), 1, 2, lambda: False)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def lose(link: Link, store: TCPStore, port: int, number: int) -> None:
    """Connect to a new peer and outlive it."""
    peer = start_peer(port, number)
    link.connect(lambda: PrefixStore(str(number), store), 0, 2, lambda: False)
    works = [link.post("allreduce", [torch.ones(1000)]) for _ in range(3)]
    os.waitpid(peer, 0)
    try:
        for work in works:
            link.wait(work)
    except GroupBroken:
        pass
    link.hang_up()
    gloo_link.wait_until_ended(works)


def count() -> tuple[int, int]:
    """Return the number of threads and of open files of this process."""
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def main(losses: int) -> None:
    """Lose `losses` peers, and count once the groups of all of them but the last are free."""
    gloo_link.FREE_SECONDS = 0.05
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link, counts = Link(), []
    for number in range(losses):
        lose(link, store, store.port, number)
        time.sleep(0.3)
        counts.append(count())
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    HashStore()  # the store's library is loaded before the first fork
    main(int(sys.argv[1]))
