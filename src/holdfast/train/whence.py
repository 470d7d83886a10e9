"""Where in a script a call comes from: within a loop of its own, or from leaving one.

Python tells neither. Both can be read from the instruction at which the script's frame stands.
"""

import dis
import inspect
import sys
from types import CodeType, FrameType

# Where a frame stands when it lets go of an iterator in order: `break` and `return` pop it, a function ends.
_IN_ORDER = (
    "POP_TOP",
    "POP_ITER",
    "END_FOR",
    "RETURN_VALUE",
    "RETURN_CONST",
    "STORE_FAST",
    "STORE_NAME",
    "DELETE_FAST",
)
_SUSPENDED = ("YIELD_VALUE", "RESUME")


def left_in_order(generator: FrameType) -> bool:
    """Whether a generator, which is being closed, was left by `break` or `return`, and not by an exception.

    It may be left through others that hand on what it yields, such as a progress bar: those are closed first.
    """
    frame = generator.f_back
    while frame is not None:
        word = _instruction(frame)
        if word in _IN_ORDER:
            return True
        if not (frame.f_code.co_flags & inspect.CO_GENERATOR and word in _SUSPENDED):
            return False
        frame = frame.f_back
    return False


def in_a_loop() -> bool:
    """Whether whoever called us was called within a loop of the script that is run, at any depth of its functions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and _loops_around(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


def _loops_around(code: CodeType, place: int) -> bool:
    """Whether a later instruction jumps back to before this place; a loop that asks for its next item is not in itself."""
    back = [each for each in dis.get_instructions(code) if "JUMP_BACKWARD" in each.opname and each.offset > place]
    return any(_begins(code, each.argval) < place for each in back)


def _begins(code: CodeType, target: int) -> int:
    while dis.opname[code.co_code[target]] == "EXTENDED_ARG":
        target += 2
    return target


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]
