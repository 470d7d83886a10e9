"""Write the lists of packages and modules in docs/ from their docstrings: `python tools/list_packages.py`.

docs/architecture.md gets one entry for each package with the names of its files, between two markers. docs/modules.md
gets the first sentence of every module. A test compares both with the source; `make format` runs this tool.
"""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "holdfast"
ARCHITECTURE, MODULES = ROOT / "docs/architecture.md", ROOT / "docs/modules.md"
BEGIN, END = "<!-- packages: written by tools/list_packages.py -->", "<!-- end of packages -->"


def first_sentence(path: Path) -> str:
    """Return the first sentence of the docstring of a file, on one line."""
    docstring = re.match(r'"""(.*?)(?:\n\n|""")', path.read_text(), flags=re.S)
    text = " ".join(docstring[1].split()) if docstring else ""
    return re.split(r"(?<=\.)\s(?=[A-Z])", text)[0]


def packages() -> dict[Path, list[Path]]:
    """Return the modules of each package, by folder: the top level first, then by name."""
    found: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            found[path.parent].append(path)
    return dict(sorted(found.items()))


def overview() -> str:
    """Return a list of all packages, each with its first sentence and its files."""
    lines = []
    for folder, paths in packages().items():
        name = "top level" if folder == SOURCE else f"{folder.relative_to(SOURCE)}/"
        sentence = "Modules that all packages share." if folder == SOURCE else first_sentence(folder / "__init__.py")
        lines.append(f"- **{name}** {sentence} `{' '.join(path.stem for path in paths)}`")
    return "\n".join([BEGIN, *lines, END])


def modules_page() -> str:
    """Return a page with a line for every module."""
    parts = [
        "# Modules\n\nThis page lists all modules of the source, folder by folder, with the first sentence of each module's "
        "docstring. It is for people who change the source: [Architecture](architecture.md) describes how the modules work "
        "together. The [glossary](reference/glossary.md) explains words such as member, term, lineage, block and shadow. "
        "The SCAR paper is [Qiao et al. 2018](https://arxiv.org/abs/1810.07354). [Results](results/README.md) names the papers "
        "that experiments of the lab repeat, such as Nicolae et al. 2022 and the ECRL report. `tools/list_packages.py` writes this page.\n"
    ]
    for folder, paths in packages().items():
        name = "src/holdfast" if folder == SOURCE else str(folder.relative_to(SOURCE))
        lines = "\n".join(f"| `{path.name}` | {first_sentence(path).replace('|', chr(92) + '|')} |" for path in paths)
        parts.append(
            f"## {name}\n\n{first_sentence(folder / '__init__.py')}\n\n| file | contents |\n|---|---|\n{lines}\n"
        )
    return "\n".join(parts)


def architecture() -> str:
    """Return the architecture document with the list of packages that the source has now."""
    before, _, rest = ARCHITECTURE.read_text().partition(BEGIN)
    return before + overview() + rest.partition(END)[2]


if __name__ == "__main__":
    ARCHITECTURE.write_text(architecture())
    MODULES.write_text(modules_page())
