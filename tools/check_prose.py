"""Find the worst habits of prose in Python files: `python tools/check_prose.py [--count] [PATH ...]`, by default src.

It reads docstrings, comments, string literals and the names of variables, and knows a few patterns that hide the subject
of a sentence. It does not judge style: most bad sentences pass, and no good one should fail. A line that must stay as it
is, such as a message of another library, ends with the comment `# prose: keep`.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPENINGS = re.compile(r"(What|Whether|How|Who|Whom|Whose|Whoever|Which|Those|All of|One that|The one that|So many)\b")
PHRASES = {
    r"who(m?)ever": "name the subject",
    r"(no|some)body": "name the subject, or write nothing or none",
    r"(?<!not )so many": "name the parameter",
    r"on record": "write recorded",
    r"(?<!be )(?<!is )(?<!are )(?<!was )(?<!were )told(?! to)(?! apart)": "say who reports what",
    r"anew": "write again",
    r"whence": "write from where",
    r"thereof|therein|thereby|wherein|whereupon": "use plain words",
}
NAMES = {"told", "said", "several", "each"}
KEEP = "# prose: keep"


@dataclass(frozen=True)
class Problem:
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def problems(source: str, path: str = "<text>") -> list[Problem]:
    """Return what is wrong in the source of a module, in the order of its lines."""
    tree = ast.parse(source)
    kept = {number for number, line in enumerate(source.splitlines(), 1) if line.rstrip().endswith(KEEP)}
    found = {*_openings(tree), *_phrases(tree, source), *_names(tree)}
    return [Problem(path, line, text) for line, text in sorted(found) if line not in kept]


def _openings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if opening := OPENINGS.match(ast.get_docstring(node) or ""):
            yield node.body[0].lineno, f"a docstring starts with {opening[0]!r}: start with a verb or a noun"


def _phrases(tree: ast.Module, source: str) -> Iterator[tuple[int, str]]:
    pieces = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    pieces += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for first, text in pieces:
        for pattern, advice in PHRASES.items():
            for match in re.finditer(rf"\b(?:{pattern})\b", text, flags=re.I):
                yield first + text[: match.start()].count("\n"), f"{match[0]!r}: {advice}"


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else None
        assigned = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
        if name in NAMES and assigned:
            yield node.lineno, f"a variable is named {name!r}: name it for the value that it holds"


def main(arguments: list[str]) -> int:
    """Print every problem, or with `--count` how many there are by package; return 1 if there is one."""
    roots = [Path(argument) for argument in arguments if argument != "--count"]
    roots = roots or [Path(__file__).resolve().parent.parent / "src"]
    files = [(root, path) for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    found = [(root, problem) for root, path in files for problem in problems(path.read_text(), str(path))]
    if "--count" in arguments:
        packages = Counter("/".join(Path(problem.path).relative_to(root).parts[:2]) for root, problem in found)
        lines = [f"{count:6} {package}" for package, count in sorted(packages.items())]
    else:
        lines = [str(problem) for _, problem in found]
    print("\n".join([*lines, f"{len(found)} problems in {len(files)} files"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
