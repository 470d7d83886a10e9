"""What happens to the nodes of a simulated cluster, beside the faults of single operations.

Nodes are lost and come back, the network splits and heals, and a supervisor that is killed or paused for long is taken
for a lost node by the others.
"""

from dataclasses import dataclass

from holdfast.supervise.nodes.rendezvous import Peers
from simulation.cluster import NOTICES, Cluster, Group
from simulation.scheduler import Process

LOOK = 0.5
LOST_AFTER = 5.0


@dataclass(slots=True, eq=False)
class Weather:
    """The events of one schedule that befall whole nodes."""

    cluster: Cluster
    partitions: float  # the probability per look
    losses: float

    @classmethod
    def drawn(cls, cluster: Cluster) -> "Weather":
        rng = cluster.world.rng
        if cluster.nodes == 1:
            return cls(cluster, 0.0, rng.choice((0.0, 0.1)))
        return cls(cluster, rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 0.05, 0.2)))

    def run(self) -> None:
        """Start the first group, and let nodes and the network fail until the run is complete."""
        cluster, world = self.cluster, self.cluster.world
        cluster.start_group([*range(cluster.nodes)], Peers(), 0.0)
        while not cluster.completed:
            world.sleep(LOOK)
            self._find_dead_supervisors()
            if cluster.faults.left > 0 and world.rng.random() < self.losses:
                self._lose(world.rng.randrange(cluster.nodes))
            if cluster.faults.left > 0 and world.rng.random() < self.partitions:
                self._split()
            elif cluster.cuts and world.rng.random() < 0.1:
                cluster.cuts.clear()
                world.record("the network heals")
            self._bring_back()
        cluster.cuts.clear()

    def _notice(self) -> float:
        return self.cluster.world.rng.choice(NOTICES) * self.cluster.world.rng.random()

    def _find_dead_supervisors(self) -> None:
        world = self.cluster.world
        for group in [*self.cluster.groups]:
            supervisor = group.supervisor
            if supervisor.is_dead:
                self._leave(group, supervisor.node)
                continue
            if supervisor.paused_until - world.now > LOST_AFTER and len(group.nodes) > 1:
                # The others take it for lost; when it runs again, it takes the others for lost.
                left = [node for node in group.nodes if node != supervisor.node]
                group.nodes, group.acts_at = [supervisor.node], supervisor.paused_until
                self.cluster.start_group(left, group.last, self._notice())
            for node in [*group.nodes]:
                until = self.cluster.frozen.get(node, 0.0)
                if node != supervisor.node and until - world.now > LOST_AFTER:
                    # It is left out; when it runs again, it takes the others for lost.
                    group.nodes.remove(node)
                    group.acts_at = world.now + LOST_AFTER
                    self.cluster.start_group([node], group.last, until - world.now + self._notice())

    def _lose(self, node: int) -> None:
        cluster = self.cluster
        if node in cluster.down or not any(node in group.nodes for group in cluster.groups):
            return
        cluster.faults.count("node loss", "training")
        for group in [*cluster.groups]:
            if node in group.nodes:
                self._leave(group, node)

    def _leave(self, group: Group, node: int) -> None:
        """Let a node die, with all of its processes."""
        cluster = self.cluster
        cluster._kill([node])
        cluster.down.add(node)
        left = [other for other in group.nodes if other != node]
        cluster.world.record(f"node {node} dies")
        if group.supervisor.node != node:
            group.nodes, group.acts_at = left, cluster.world.now + self._notice()
            return
        group.supervisor.is_dead = True
        cluster.groups.remove(group)
        if left:
            cluster.start_group(left, group.last, self._notice())

    def _split(self) -> None:
        """Cut a part of a group off, in both directions or in one."""
        cluster, rng = self.cluster, self.cluster.world.rng
        groups = [group for group in cluster.groups if len(group.nodes) > 1]
        if not groups:
            return
        group = rng.choice(groups)
        part = sorted(rng.sample(group.nodes, rng.randint(1, len(group.nodes) - 1)))
        rest = [node for node in group.nodes if node not in part]
        away = part if group.supervisor.node in rest else rest
        stays = [node for node in group.nodes if node not in away]
        one_way = rng.random() < 0.4
        cluster.faults.count("one-way partition" if one_way else "partition", "training")
        directions = [(away, stays)] if one_way else [(away, stays), (stays, away)]
        cluster.cuts |= {(a, b) for source, target in directions for a in source for b in target}
        cluster.world.record(f"the network splits: {stays} | {away}{' in one direction' if one_way else ''}")
        group.nodes, group.acts_at = stays, cluster.world.now + self._notice()
        cluster.start_group(away, group.last, self._notice())

    def _bring_back(self) -> None:
        """Let nodes without a supervisor come back to the group that trains, if they can reach it.

        If no group is left, all nodes have to come: they have not met, and do not know which term they were in."""
        cluster, world = self.cluster, self.cluster.world
        inside = {node for group in cluster.groups for node in group.nodes}
        outside = [node for node in range(cluster.nodes) if node not in inside]
        if not outside or cluster.completed or world.rng.random() > 0.2:
            return
        if not cluster.groups:
            cluster.cuts.clear()
            for node in outside:
                self._renew(node)
            cluster.start_group(outside, Peers(), 0.0)
            return
        node = world.rng.choice(outside)
        group = max(cluster.groups, key=lambda group: group.last.term.number if group.last.term else 0)
        if group.supervisor.is_dead or any(node in cut for cut in cluster.cuts):
            return
        self._renew(node)
        group.nodes, group.acts_at = sorted([*group.nodes, node]), world.now
        world.record(f"node {node} comes back")

    def _renew(self, node: int) -> None:
        cluster = self.cluster
        cluster.down.discard(node)
        cluster.who[node], cluster.terms[node] = f"{node}-{cluster.world.rng.randbytes(6).hex()}", 0


def operator() -> Process:
    return Process("operator", -1)
