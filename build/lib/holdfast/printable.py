"""Text from untrusted files and folder names, made safe to print."""


def printable(text: str) -> str:
    """Escape the characters of `text` that do not print, such as terminal control codes and non-UTF-8 bytes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
