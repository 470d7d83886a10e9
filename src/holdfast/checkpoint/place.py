"""From a place, a path or a URL, to the store that is there."""

import os
from pathlib import Path

from holdfast.checkpoint.store import DirectoryStore, Store
from holdfast.errors import NotAStore


def open_store(place: str | os.PathLike[str], **options: object) -> Store:
    """The store at a path or a URL such as s3://bucket/run, for reading: it must be there already."""
    text = os.fspath(place)
    if "://" in text:
        from holdfast.checkpoint.objects import ObjectStore  # fsspec is slow to import, and most stores are directories

        objects = ObjectStore(text, **options)
        if not objects.names():
            raise NotAStore(f"{text} holds no objects: give the URL that a run saved to")
        return objects
    if not Path(text).is_dir():
        why = "is a file, not a directory" if Path(text).exists() else "does not exist"
        raise NotAStore(f"{text} {why}: give the directory that a run saved to")
    return DirectoryStore(text)
