"""On which line of a TOML text something stands, so that whoever wrote it finds what is wrong. Pure.

The standard library's reader keeps no lines. This looks for them only once something is known to be wrong.
"""

import re

_HEADER = re.compile(r"\s*\[\[?([^\[\]=,]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")


def line_of(text: str, table: str = "", key: str = "", value: object = None, nth: int = 0) -> int:
    """The line of a key in a table, or of one value of it; without a key, that of the table's header, or of the first
    table below it.

    `table` is "" for keys before the first header. Of several tables of one name, as an array of tables has, it is the
    one with this number. It is 0 if there is no such line.
    """
    here, seen = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            here = _plain(header[1])
            seen += here == table or (not key and here.startswith(f"{table}."))
            if not key and seen > nth:
                return number
        elif (found := _KEY.match(line)) and _is(here, found[1], table, key) and (not table or seen > nth or not seen):
            return number if value is None else _line_of_value(text, number, value)
    return 0


def _line_of_value(text: str, first: int, value: object) -> int:
    """The line from this one on that has the value; it may be one of many in a list over several lines."""
    shown = re.escape(str(value))
    pattern = rf"[\"']{shown}[\"']" if isinstance(value, str) else rf"(?<![\w.-]){shown}(?![\w.])"
    for number, line in enumerate(text.splitlines()[first - 1 :], first):
        if re.search(pattern, line):
            return number
    return first


def _is(here: str, name: str, table: str, key: str) -> bool:
    return ".".join(filter(None, (here, _plain(name)))) == ".".join(filter(None, (table, key)))


def _plain(name: str) -> str:
    """A dotted name without the blanks and quotes that it may be written with."""
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
