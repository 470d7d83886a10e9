"""The first call of torch's vector functions in a process, made here by one thread alone.

On x86, torch hands `sqrt`, `exp` and their like to oneMKL, which chooses a kernel when a process first calls one. Where
several threads make that first call together, one of them may compute its share with a less exact kernel (torch's issue
188792; seen in 18 of 9,000 processes on two busy cores, and in none of 9,000 that had called it before): the first step
of Adam in a worker that was started anew then differs from that of one that never stopped.
"""

from functools import cache

import torch

FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2"),
    *("expm1", "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "round", "rsqrt", "sigmoid", "sin", "sinh"),
    *("sqrt", "tan", "tanh", "trunc"),
)


@cache
def settle() -> None:
    """Call each function once, on a single value: no thread is started for that, and later calls find what it chose."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
