"""The optional extras of the installation, and the modules that each of them installs."""

from importlib.util import find_spec

from holdfast.errors import BadInput

# The modules that each extra in pyproject.toml installs.
EXTRAS: dict[str, tuple[str, ...]] = {
    "lab": ("jinja2", "llvmlite", "matplotlib", "numba", "PIL", "scipy", "sklearn"),
}


def require(extra: str, what: str) -> None:
    """Raise BadInput if a module of the optional dependencies `extra` is missing; `what` names the feature."""
    if modules := missing(extra):
        raise BadInput(
            f"{what} needs packages that are not installed ({', '.join(modules)}): pip install 'holdfast[{extra}]'."
        )


def missing(extra: str) -> list[str]:
    """Return the modules of the optional dependency group `extra` that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]
