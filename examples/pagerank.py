"""PageRank of a random web: a model of one's own whose blocks are pages, each with its rank.

holdfast serve train --workload examples/pagerank.py --nodes 3 --workers 2 --out runs/pagerank --inject kill@5
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.workloads.divided import Push, RoundId, share
from holdfast.workloads.model import Model

Arrays = dict[str, NDArray[np.float64]]
FOLLOWED = 0.85  # how often somebody follows a link, where otherwise they go to any page


class Links(NamedTuple):
    """Links of some pages: from which page to which."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]


class PageRank(Model):
    """Every page is a block: its rank, and its rank in the iteration before."""

    criterion = 1e-6  # the ranks have converged when they change by less, all together

    def __init__(self, pages: int, links: Links) -> None:
        self.pages, self.links = pages, links
        self.links_of = np.bincount(links.source, minlength=pages)

    def start(self, stream: int = 0) -> Arrays:
        """All pages have the same rank."""
        rank = np.full(self.pages, 1 / self.pages)
        return {"rank": np.column_stack((rank, np.zeros(self.pages)))}

    def part(self, worker: int, workers: int) -> Links:
        """One worker's links."""
        mine = share(len(self.links.source), worker, workers)
        return Links(self.links.source[mine], self.links.target[mine])

    def compute(self, part: Links, when: RoundId, pulled: Arrays, summed: Arrays) -> Push:
        """For every page what flows to it over this worker's links."""
        flow = pulled["rank"][part.source, 0] / self.links_of[part.source]
        flows = np.bincount(part.target, flow, minlength=self.pages)
        return Push(np.arange(self.pages), {"rank": flows[:, None]})

    def apply(self, when: RoundId, ids: NDArray[np.int64], held: Arrays, pushed: Arrays) -> None:
        """A page's new rank is what flows to it, and its share of those who go to any page."""
        held["rank"][:, 1] = held["rank"][:, 0]
        held["rank"][:, 0] = (1 - FOLLOWED) / self.pages + FOLLOWED * pushed["rank"][:, 0]

    def measure(self, part: Links, pulled: Arrays, summed: Arrays) -> float:
        """How much all ranks have changed, of which every worker tells its part by the number of its links."""
        changed = np.abs(pulled["rank"][:, 0] - pulled["rank"][:, 1]).sum()
        return float(changed * len(part.source) / len(self.links.source))


def workload(data: Path | None) -> PageRank:
    """The model, on a web in which every page has some links, and few pages have most of those that point to them."""
    rng, pages = np.random.default_rng(0), 500
    source = np.repeat(np.arange(pages), rng.integers(1, 10, pages))
    target = (pages * rng.random(len(source)) ** 3).astype(np.int64)
    return PageRank(pages, Links(source, target))
