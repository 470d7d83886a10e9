"""Replace a file atomically: a reader finds either the old content or the new, never a part of it."""

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes, temporary: Path, *, durable: bool = False) -> None:
    """Write `data` to the file `temporary` in the folder of `path`, and rename it to `path`.

    `durable` syncs the file and its folders, so that the new content survives a power failure. Two processes that may
    write the same path at the same time must use different files as `temporary`."""
    try:
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(number, rest) :]
            if durable:
                os.fsync(number)
        finally:
            os.close(number)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_folder(path.parent)
        with suppress(PermissionError):  # the folder's own name, if it is new; a folder we may not open is not new
            sync_folder(path.parent.parent)


def sync_folder(folder: Path) -> None:
    """Sync the directory `folder`, so that the names of its new files survive a power failure."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
