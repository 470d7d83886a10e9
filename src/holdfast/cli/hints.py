"""What to say beside a usage error, where the likely mistake is known. Pure."""

import shlex
from collections.abc import Sequence


def forgotten_dashes(argv: Sequence[str], option: str | None) -> str:
    """How the command was meant, if an option that we do not know stands behind a script: it is the script's own."""
    given = next((i for i, each in enumerate(argv) if option and each.partition("=")[0] == option), None)
    if given is None or argv[:1] != ["run"] or not any(each.endswith(".py") for each in argv[1:given]):
        return ""
    meant = shlex.join(["holdfast", *argv[:given], "--", *argv[given:]])
    return f"What the script is given comes after --: {meant}"
