"""Seeds of tests whose cases are drawn at random."""

from hypothesis import settings

EXAMPLES = 50  # of the profile in which tests run all their seeds


def seeds(count: int) -> range:
    """Return `count` seeds. The Hypothesis profile changes their number as it changes that of examples."""
    return range(max(1, count * settings().max_examples // EXAMPLES))
