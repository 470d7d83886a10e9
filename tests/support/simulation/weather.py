"""What happens to the nodes of a simulated cluster, beside the faults of single operations.

Nodes are lost and come back, and the network splits and heals. A machine that is lost may refuse connections, because
only its processes have died, or be silent.
"""

from dataclasses import dataclass

from simulation.cluster import Cluster
from simulation.scheduler import Process

LOOK = 0.5


@dataclass(slots=True, eq=False)
class Weather:
    """The events of one schedule that befall whole nodes. All numbers are probabilities per look."""

    cluster: Cluster
    partitions: float
    losses: float
    returns: float

    @classmethod
    def drawn(cls, cluster: Cluster) -> "Weather":
        rng = cluster.world.rng
        returns = rng.choice((0.02, 0.2))
        if cluster.nodes == 1:
            return cls(cluster, 0.0, rng.choice((0.0, 0.1)), returns)
        return cls(cluster, rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 0.05, 0.2)), returns)

    def run(self) -> None:
        """Start all supervisors, and let nodes and the network fail until the run is complete."""
        cluster, world = self.cluster, self.cluster.world
        for node in range(cluster.nodes):
            cluster.start(node, world.rng.random())
        while not cluster.completed:
            world.sleep(LOOK)
            for node, supervisor in [*cluster.supervisors.items()]:
                if supervisor.is_dead:
                    self._lose(node)
            if cluster.faults.left > 0 and world.rng.random() < self.losses:
                self._strike(world.rng.randrange(cluster.nodes))
            if cluster.faults.left > 0 and world.rng.random() < self.partitions:
                self._split()
            elif cluster.cuts and world.rng.random() < 0.1:
                cluster.cuts.clear()
                world.record("the network heals")
            self._bring_back()
        cluster.cuts.clear()

    def _strike(self, node: int) -> None:
        if node in self.cluster.supervisors:
            self.cluster.faults.count("node loss", "training")
            self._lose(node)

    def _lose(self, node: int) -> None:
        """Let a node die, with all of its processes."""
        cluster, world = self.cluster, self.cluster.world
        cluster.lose(node)
        if is_silent := world.rng.random() < 0.5:
            cluster.network.silent.add(node)
        world.record(f"node {node} dies{' and is silent' if is_silent else ''}")

    def _split(self) -> None:
        """Cut a part of the nodes off, in both directions or in one."""
        cluster, rng = self.cluster, self.cluster.world.rng
        if cluster.nodes == 1 or cluster.cuts:
            return
        part = sorted(rng.sample(range(cluster.nodes), rng.randint(1, cluster.nodes - 1)))
        rest = [node for node in range(cluster.nodes) if node not in part]
        one_way = rng.random() < 0.4
        cluster.faults.count("one-way partition" if one_way else "partition", "training")
        directions = [(part, rest)] if one_way else [(part, rest), (rest, part)]
        cluster.cuts |= {(a, b) for source, target in directions for a in source for b in target}
        cluster.world.record(f"the network splits: {part} | {rest}{' in one direction' if one_way else ''}")

    def _bring_back(self) -> None:
        """Let a node that was lost come back, with a new supervisor."""
        cluster, world = self.cluster, self.cluster.world
        outside = [node for node in range(cluster.nodes) if node not in cluster.supervisors]
        if not outside or cluster.completed or world.rng.random() > self.returns:
            return
        node = world.rng.choice(outside)
        cluster.network.silent.discard(node)
        cluster.start(node)
        world.record(f"node {node} comes back")


def operator() -> Process:
    return Process("operator", -1)
