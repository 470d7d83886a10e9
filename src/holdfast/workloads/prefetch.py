"""A hint to the processor from compiled code: memory that will be needed soon. It changes speed, and nothing else."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.cgutils import create_struct_proxy
from numba.extending import intrinsic

CACHE_LINE = 64  # bytes

_BYTE = ir.IntType(8)
_INT = ir.IntType(32)


@intrinsic
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of an element that will be needed soon, to change it."""

    def generate(context: Any, build: Any, signature: Any, values: Any) -> Any:
        pointer = _BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
        instruction = build.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        element = build.gep(first_element(context, build, signature.args[0], values[0]), [values[1]])
        write, keep, data = _INT(1), _INT(3), _INT(1)
        build.call(instruction, [build.bitcast(element, pointer), write, keep, data])
        return context.get_dummy_value()

    return types.void(array, at), generate


def first_element(context: Any, build: Any, kind: Any, array: Any) -> Any:
    """The address of an array's first element."""
    return create_struct_proxy(kind)(context, build, value=array).data  # type: ignore[no-untyped-call]
