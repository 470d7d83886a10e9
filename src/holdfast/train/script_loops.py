"""Finds a second loop that a script would make only after it has trained the first, before anything is trained."""

import ast
from pathlib import Path

MAKERS = frozenset({"batches", "epochs", "steps", "stream"})


def late_loop(script: Path) -> int | None:
    """Return the line of a loop over `run.batches(...)` that follows another such loop; None if there is none.

    Only loops of one block, where the second certainly follows the first, are compared.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    runs = {name for node in ast.walk(tree) if isinstance(node, ast.Assign) for name in _attached(node)}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.FunctionDef) and isinstance(body, list):
            loops = [statement for statement in body if isinstance(statement, ast.For) and _makes(statement.iter, runs)]
            if len(loops) > 1:
                return loops[1].lineno
    return None


def _attached(assignment: ast.Assign) -> list[str]:
    """Return the names that an assignment gives to the result of `attach()`."""
    call = assignment.value
    name = call.func if isinstance(call, ast.Call) else None
    called = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
    return [target.id for target in assignment.targets if isinstance(target, ast.Name)] if called == "attach" else []


def _makes(expression: ast.expr, runs: set[str]) -> bool:
    """Return True if the expression calls `batches`, or another method that makes a loop, of one of the `runs`."""
    calls = (node.func for node in ast.walk(expression) if isinstance(node, ast.Call))
    return any(
        isinstance(call, ast.Attribute)
        and call.attr in MAKERS
        and isinstance(call.value, ast.Name)
        and call.value.id in runs
        for call in calls
    )
