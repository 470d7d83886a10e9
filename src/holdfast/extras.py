"""The optional parts of the installation: which packages each needs, and one line that says how to get them."""

from importlib.util import find_spec

from holdfast.errors import BadInput

# Of an extra in pyproject.toml the modules that it brings.
EXTRAS: dict[str, tuple[str, ...]] = {
    "lab": ("jinja2", "llvmlite", "matplotlib", "numba", "PIL", "sklearn"),
}


def require(extra: str, what: str) -> None:
    """Refuse `what` in one line where packages of this extra are missing, before any work is done for it."""
    if lacking := missing(extra):
        raise BadInput(
            f"{what} needs packages that are not installed ({', '.join(lacking)}): pip install 'holdfast[{extra}]'"
        )


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]
