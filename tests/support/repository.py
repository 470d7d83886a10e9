"""Where the repository and its examples are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def lines(name: str) -> list[str]:
    """Return the lines of an example without their indentation, which changes with the loop over epochs."""
    return [stripped for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if (stripped := line.strip())]
