"""Apply `map.toml`: move modules, merge files that hold one idea, and rewrite every import. Logic never changes.

The reorganisation of the source tree was done with this script, so that a reviewer can repeat and check it:

    python tools/relayout/apply.py move      # git mv every module of [move]; imports follow
    python tools/relayout/apply.py merge     # put the files of each [merge] entry together
    python tools/relayout/apply.py aliases   # drop `import new as old` where the new name is free
    python tools/relayout/apply.py rename    # rename the classes and functions of [rename]
    python tools/relayout/apply.py verify REV  # compare the syntax trees of every moved file with those at REV
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "holdfast"
PYTHON_FOLDERS = ("src", "tests", "benchmarks", "examples", "docs", "experiments", "tools")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".yaml", ".cfg"}
MAP = tomllib.loads(Path(__file__).with_name("map.toml").read_text())


def module_path(module: str) -> Path:
    """Return the file of `module`, named below `holdfast`."""
    return SRC.joinpath(*module.split(".")).with_suffix(".py")


def modules() -> set[str]:
    """Return every module and package below `holdfast`, by dotted name."""
    names = set()
    for path in SRC.rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names - {""}


def python_files() -> list[Path]:
    """Return the Python files whose imports are rewritten."""
    return sorted(
        p for folder in PYTHON_FOLDERS for p in (ROOT / folder).rglob("*.py") if Path(__file__).parent not in p.parents
    )


class Edits:
    """Replacements in one text, by line and column as the syntax tree gives them."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines(keepends=True)
        self._edits: list[tuple[int, int, str]] = []
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._bytes = text.encode()

    def replace(self, node: ast.AST, new: str) -> None:
        """Replace the text of `node` by `new`."""
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        self._edits.append((start, end, new))

    def text(self) -> str:
        """Return the text with all replacements made."""
        data = self._bytes
        for start, end, new in sorted(self._edits, reverse=True):
            data = data[:start] + new.encode() + data[end:]
        return data.decode()


def rewritten_imports(text: str, known: set[str], new_of: dict[str, str]) -> str:
    """Return `text` with every import of a moved module naming its new place; local names stay."""
    edits = Edits(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "holdfast":
            edits.replace(node, _import_from(node, known, new_of))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                inner = alias.name.removeprefix("holdfast.")
                if alias.name.startswith("holdfast.") and inner in new_of:
                    edits.replace(alias, f"holdfast.{new_of[inner]}" + (f" as {alias.asname}" if alias.asname else ""))
    return edits.text()


def _import_from(node: ast.ImportFrom, known: set[str], new_of: dict[str, str]) -> str:
    package = (node.module or "").removeprefix("holdfast").removeprefix(".")
    groups: dict[str, list[str]] = defaultdict(list)
    for alias in node.names:
        full = f"{package}.{alias.name}".removeprefix(".")
        bound = alias.asname or alias.name
        if full in known:
            new = new_of.get(full, full)
            parent, _, stem = new.rpartition(".")
            groups[parent].append(stem if stem == bound else f"{stem} as {bound}")
        else:
            suffix = f" as {alias.asname}" if alias.asname else ""
            groups[new_of.get(package, package)].append(alias.name + suffix)
    indent = "\n" + " " * node.col_offset
    lines = (f"from {'.'.join(filter(None, ('holdfast', m)))} import {', '.join(names)}" for m, names in groups.items())
    return indent.join(lines)


def rewrite_texts(new_of: dict[str, str]) -> None:
    """Rewrite dotted names and file names of moved modules in strings, comments and documents."""
    paths = {old.replace(".", "/") + ".py": new.replace(".", "/") + ".py" for old, new in new_of.items()}
    dotted = re.compile(r"\bholdfast((?:\.[a-z_]+)+)")
    slashed = re.compile(r"\b(?:[a-z_]+/)*[a-z_]+\.py\b")

    def by_module(match: re.Match[str]) -> str:
        parts = match[1][1:].split(".")
        for n in range(len(parts), 0, -1):
            if (old := ".".join(parts[:n])) in new_of:
                return ".".join(["holdfast", new_of[old], *parts[n:]])
        return match[0]

    def by_path(match: re.Match[str]) -> str:
        for prefix in ("src/holdfast/", "holdfast/", ""):
            rest = match[0].removeprefix(prefix)
            if match[0].startswith(prefix) and "/" in rest and rest in paths:
                return prefix + paths[rest]
        return match[0]

    for path in ROOT.rglob("*"):
        relative = path.relative_to(ROOT)
        if (
            path.suffix not in TEXT_SUFFIXES
            or not path.is_file()
            or relative.parts[0] in (".venv", ".git", "CHANGELOG.md")
        ):
            continue
        if Path(__file__).parent in path.parents:
            continue
        text = path.read_text()
        new = slashed.sub(
            by_path, dotted.sub(by_module, text) if path.suffix != ".py" else _in_strings(text, dotted, by_module)
        )
        if new != text:
            path.write_text(new)


def _in_strings(text: str, pattern: re.Pattern[str], replacement: object) -> str:
    edits = Edits(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.search(node.value):
            source = ast.get_source_segment(text, node) or ""
            edits.replace(node, pattern.sub(replacement, source))  # type: ignore[arg-type]
    return edits.text()


def move() -> None:
    """Move every module of [move] by git and let all imports follow."""
    known, new_of = modules(), MAP["move"]
    missing = [old for old in new_of if old not in known]
    assert not missing, missing
    moving = {old: new for old, new in new_of.items() if old != new}
    for path in python_files():
        text = path.read_text()
        if "holdfast" in text and (new := rewritten_imports(text, known, moving)) != text:
            path.write_text(new)
    rewrite_texts(moving)
    staged = {old: module_path(old).with_suffix(".moving") for old in moving}
    for old, temporary in staged.items():
        git("mv", str(module_path(old)), str(temporary))
    for old, temporary in staged.items():
        target = module_path(moving[old])
        target.parent.mkdir(parents=True, exist_ok=True)
        git("mv", str(temporary), str(target))
    for package, docstring in MAP["packages"].items():
        init = SRC.joinpath(*package.split("."), "__init__.py")
        if not init.exists():
            init.write_text(f'"""{docstring}"""\n')
    for init in list(SRC.rglob("__init__.py")):
        if init.parent != SRC and len(list(init.parent.glob("*"))) == 1 + (init.parent / "__pycache__").exists():
            git("rm", "-q", "-f", str(init))


def merge() -> None:
    """Put the files of every [merge] entry together into the target; importers follow."""
    known = modules()
    new_of = {source: target for target, sources in MAP["merge"].items() for source in sources if source != target}
    merged = {target: _merged(target, sources, known) for target, sources in MAP["merge"].items()}
    for target, text in merged.items():
        module_path(target).write_text(text)
    for source in new_of:
        git("rm", "-q", "-f", str(module_path(source)))
    for path in python_files():
        text = path.read_text()
        if "holdfast" in text and (new := rewritten_imports(text, known, new_of)) != text:
            path.write_text(new)
    rewrite_texts(new_of)


def _merged(target: str, sources: list[str], known: set[str]) -> str:
    docs: list[str] = []
    imports: list[str] = []
    bodies: list[str] = []
    bound: dict[str, str] = {}
    for source in sources:
        text = module_path(source).read_text()
        text = _without_siblings(text, set(sources), known)
        tree = ast.parse(text)
        edits = Edits(text)
        for index, node in enumerate(tree.body):
            segment = ast.get_source_segment(text, node) or ""
            if index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docs.insert(0 if source == target else len(docs), str(node.value.value).strip())
                edits.replace(node, "")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports.append(segment)
                edits.replace(node, "")
                for alias in node.names:
                    origin = f"{getattr(node, 'module', '')}.{alias.name}"
                    _bind(bound, alias.asname or alias.name, origin, target)
            else:
                duplicate = False
                for name in _names(node):
                    duplicate = bound.get(name) == segment
                    _bind(bound, name, segment, target)
                if duplicate:
                    edits.replace(node, "")
        bodies.append(edits.text().strip("\n"))
    doc = "\n\n".join(docs)
    ending = '"""' if "\n" not in doc else '\n"""'
    return f'"""{doc}{ending}\n\n' + "\n".join(dict.fromkeys(imports)) + "\n\n" + "\n\n\n".join(bodies) + "\n"


def _bind(bound: dict[str, str], name: str, origin: str, target: str) -> None:
    if bound.setdefault(name, origin) != origin:
        print(f"collision in {target}: {name}: {bound[name][:60]!r} and {origin[:60]!r}")


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _without_siblings(text: str, siblings: set[str], known: set[str]) -> str:
    """Drop imports from files that are merged into the same file, and the module names before their attributes."""
    tree = ast.parse(text)
    edits, modules_by_alias = Edits(text), {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast")):
            continue
        package = (node.module or "").removeprefix("holdfast").removeprefix(".")
        kept, aliased = [], []
        for alias in node.names:
            full = f"{package}.{alias.name}".removeprefix(".")
            if full in known and full in siblings:
                modules_by_alias[alias.asname or alias.name] = full
            elif package in siblings and full not in known:
                if alias.asname:
                    aliased.append((alias.asname, alias.name))
            else:
                kept.append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
        if len(kept) != len(node.names):
            replacement = f"from {node.module} import {', '.join(kept)}" if kept else ""
            if not replacement and node.col_offset:
                replacement = "pass"
            edits.replace(node, replacement)
        for new, old in aliased:
            for use in ast.walk(tree):
                if isinstance(use, ast.Name) and use.id == new:
                    edits.replace(use, old)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules_by_alias:
            edits.replace(node, node.attr)
    return edits.text()


def aliases() -> None:
    """Use a module's new name where an import kept the old one and the new name is free in that file."""
    known = modules()
    for path in python_files():
        text = path.read_text()
        tree = ast.parse(text)
        taken = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        taken |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        taken |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        edits = Edits(text)
        changed = False
        for node in ast.walk(tree):
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast")):
                continue
            package = (node.module or "").removeprefix("holdfast").removeprefix(".")
            for alias in node.names:
                full = f"{package}.{alias.name}".removeprefix(".")
                if alias.asname and full in known and alias.asname != "module" and alias.name not in taken:
                    changed = True
                    edits.replace(alias, alias.name)
                    for use in ast.walk(tree):
                        if isinstance(use, ast.Name) and use.id == alias.asname:
                            edits.replace(use, alias.name)
        if changed:
            path.write_text(edits.text())


def rename() -> None:
    """Rename the classes and functions of [rename], `"module:old" = "new"`, wherever they are used."""
    known = modules()
    exported: dict[tuple[str, str], str] = {}
    for place, new in MAP["rename"].items():
        module, old = place.split(":")
        exported[module, old] = new
        for parent in _parents(module):
            exported[parent, old] = new
    for path in python_files():
        text = path.read_text()
        new_text = _renamed(path, text, known, exported)
        if new_text != text:
            path.write_text(new_text)


def _parents(module: str) -> list[str]:
    return ["events"] if module.startswith("events.") else []


def _renamed(path: Path, text: str, known: set[str], exported: dict[tuple[str, str], str]) -> str:
    tree = ast.parse(text)
    own = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") if SRC in path.parents else ""
    local = {old: new for (module, old), new in exported.items() if module == own and own != "events"}
    attributes: dict[tuple[str, str], str] = {}
    edits = Edits(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "holdfast":
            package = (node.module or "").removeprefix("holdfast").removeprefix(".")
            for alias in node.names:
                full = f"{package}.{alias.name}".removeprefix(".")
                if full in known:
                    for (module, old), new in exported.items():
                        if module == full:
                            attributes[alias.asname or alias.name, old] = new
                elif (package, alias.name) in exported:
                    new = exported[package, alias.name]
                    if alias.asname is None:
                        local[alias.name] = new
                        edits.replace(alias, new)
                    elif alias.asname == new:
                        edits.replace(alias, new)
                    else:
                        edits.replace(alias, f"{new} as {alias.asname}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in local:
            edits.replace(node, local[node.id])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in attributes:
                edits.replace(node, f"{node.value.id}.{attributes[node.value.id, node.attr]}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in local:
            segment = ast.get_source_segment(text, node) or ""
            edits.replace(node, segment.replace(node.value, local[node.value]))
    result = edits.text()
    for old, new in local.items():
        result = re.sub(rf"^(class|def|async def) {old}\b", rf"\1 {new}", result, flags=re.M)
    return result


def verify(revision: str) -> None:
    """Compare the syntax tree of every moved module, its imports left out, with that at `revision`."""
    differ = 0
    for old, new in MAP["move"].items():
        before = git("show", f"{revision}:src/holdfast/{old.replace('.', '/')}.py")
        if _logic(before) != _logic(module_path(new).read_text()):
            differ += 1
            print(f"differs: {old} -> {new}")
    print(f"{len(MAP['move'])} moved modules, {differ} differ beyond imports and the names of modules in texts")
    sys.exit(differ > 0)


def _logic(text: str) -> str:
    class Strip(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
            return None if (node.module or "").startswith("holdfast") else node

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Constant("text") if isinstance(node.value, str) else node

    return ast.dump(Strip().visit(ast.parse(text)))


def git(*arguments: str) -> str:
    """Run git in the repository and return what it prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    {"move": move, "merge": merge, "aliases": aliases, "rename": rename, "verify": verify}[command](*rest)
