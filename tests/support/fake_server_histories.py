"""Histories of runs on the parameter server, written by hand."""

import numpy as np

from holdfast.events import Event, Iterate, Lost, Open, Restored, Serve, Struck, What

PLAN = Serve(0, "quadratic", 4, 2, 1, 1, "full", "1", 2, "partial", 7, 0, 1e-3, 99)


def told(*whats: What, who: str = "controller") -> list[Event]:
    """Lines of one writer, a second apart."""
    return [Event(float(at), who, what) for at, what in enumerate(whats)]


def done(iteration: int, loss: float | None) -> Iterate:
    return Iterate(iteration, loss, 1.0, 0.125, 0.5, 0.125, 0.0625, 0.0625)


def contracting(c: float = 0.8, count: int = 20) -> list[What]:
    """A run whose distance to the optimum falls by c."""
    return [Open(2), PLAN, *(done(k, 5.0 + c ** (2 * (k + 1))) for k in range(count))]


def perturbed(c: float = 0.8, count: int = 20, at: int = 12) -> list[What]:
    """The same run, which loses half of its blocks and goes back to the state of two iterations before with them."""
    distances = np.full(4, 0.5)
    whats: list[What] = [Open(2), PLAN]
    before = distances
    for k in range(count):
        if k == at:
            size = float(np.linalg.norm((before - distances)[:2]))
            distances = np.concatenate([before[:2], distances[2:]])
            whats += [
                Struck(k, "node", (0,)),
                Lost(k, 0, "node", 0, "its process died", (0, 1), k),
                Restored(k, 0, 1, 1, (0, 1), (k - 2, k - 2), 0.25, size),
            ]
        before = distances if k == at - 2 else before
        distances = distances * c
        whats.append(done(k, 5.0 + float(distances @ distances)))
    return whats
