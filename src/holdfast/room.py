"""Whether this machine has memory for so many processes, before any of them is started."""

import os

from holdfast.errors import BadInput


def require_room(processes: int, least: int, who: str, advice: str) -> None:
    """Refuse more processes than fit, if each takes at least so many bytes: the kernel would end others for them."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if processes * least > there:
        raise BadInput(
            f"{processes} {who} need {processes * least / 2**30:.3g} GiB of memory or more, and this machine has "
            f"{there / 2**30:.3g}: {advice}"
        )
