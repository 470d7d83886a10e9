"""The optional extras of the installation, and the modules that each of them installs."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from holdfast.errors import BadInput
from holdfast.libraries import hiding_files
from holdfast.own_file import in_one_line

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


def import_extra(module: str, extra: str, what: str) -> ModuleType:
    """Import and return `module`, which the optional dependencies `extra` install.

    If this fails, raise BadInput: it says that the module is not installed, or why it cannot be imported, and which files
    hide packages that it may need. `what` names the feature and the package, such as "The server needs Ray"."""
    try:
        return import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            raise BadInput(f"{what}, which is not installed: pip install 'holdfast[{extra}]'.") from error
        hiding = "".join(
            f" {file} has the name of the installed package {name} and hides it: rename the file."
            for name, file in hiding_files()
        )
        failed = in_one_line(error).removesuffix(".")
        raise BadInput(f"{what}, which is installed, but its import failed: {failed}.{hiding}") from error
