"""The newest snapshot on its way from the disk while a script still builds the model that it belongs to.

The overlapped writer writes past the system's cache, so that a restart has to read from the disk itself.
"""

import threading
from contextlib import suppress

from holdfast import memory
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.errors import HoldfastError


def read_ahead(store: Store) -> None:
    """Begin to read the newest snapshot of a directory in the background; other stores are left alone.

    It changes nothing but when the disk is read. Whatever goes wrong here goes wrong again in `load`, which says so.
    """
    if isinstance(store, DirectoryStore):
        threading.Thread(target=_newest, args=(store,), name="holdfast-ahead", daemon=True).start()


def _newest(store: DirectoryStore) -> None:
    with suppress(HoldfastError, OSError):
        for step in snapshot.steps(store)[-1:]:
            name, length = snapshot.tensors_name(step), snapshot.read_manifest(store, step).bytes
            memory.require(name, length)
            store.read_ahead(name, length)  # and no more: the file itself may be a stranger's, of any length
