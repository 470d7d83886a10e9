"""Functions on tensors, recorded as CUDA graphs: a call then costs one launch instead of one for each kernel."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

Body: TypeAlias = Callable[[], None]
"""A function without arguments that reads and writes only tensors that stay where they are."""
Recorder: TypeAlias = Callable[[Sequence[Body]], list[Body]]
"""A function that makes faster ones of bodies."""

WARM_UP = 3  # calls before the recording, in which libraries allocate what they keep


def recorded(bodies: Sequence[Body]) -> list[Body]:
    """Run `bodies` a few times on the CUDA device, record each as a graph, and return the functions that replay them.

    Raise RuntimeError if CUDA cannot record them. The graphs share memory, so they must be replayed in this order;
    later ones may be left out."""
    kept = torch.cuda.current_stream()
    try:
        _warm_up(bodies, torch.cuda.Stream())
        graphs = list[torch.cuda.CUDAGraph]()
        for body in bodies:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=graphs[0].pool() if graphs[1:] else None):
                body()
        return [graph.replay for graph in graphs]
    finally:
        torch.cuda.set_stream(kept)  # a recording that fails leaves its own stream behind


def _warm_up(bodies: Sequence[Body], side: torch.cuda.Stream) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            for body in bodies:
                body()
    torch.cuda.current_stream().wait_stream(side)
