"""Which CUDA kernels give the same bits every time: forward and backward of each operation, many times, in two processes.

python benchmarks/determinism/bench.py
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

TIMES = 20
Case = Callable[[], list[torch.Tensor]]


def on_gpu(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, device="cuda")


def of(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Case:
    """The result and the gradients of a function."""

    def run() -> list[torch.Tensor]:
        out = function(*inputs)
        leaves = [each for each in inputs if each.requires_grad]
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out)) if leaves else ()
        return [out.detach(), *grads]

    return run


def module(layer: nn.Module, *inputs: torch.Tensor) -> Case:
    """The result of a layer, and the gradients of its inputs and parameters."""
    layer = layer.cuda()

    def run() -> list[torch.Tensor]:
        out = layer(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        leaves = [*(each for each in inputs if each.requires_grad), *layer.parameters()]
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    return run


def attention(backend: SDPBackend, dtype: torch.dtype) -> Case:
    qkv = [on_gpu(4, 12, 1024, 64, dtype=dtype) for _ in range(3)]

    def run(*each: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*each, is_causal=True)

    return of(run, *qkv)


def adamw(**how: bool) -> Case:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        weight = nn.Parameter(torch.randn(2048, 2048, device="cuda"))
        optimizer = torch.optim.AdamW([weight], **how)
        for _ in range(3):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        return [weight.detach()]

    return run


def cases() -> dict[str, Callable[[], Case]]:
    """Each operation, made when it is its turn: what cannot be made is refused alone."""
    half = torch.bfloat16
    image = (16, 64, 56, 56)
    return {
        "linear, float32": lambda: module(nn.Linear(1024, 4096), on_gpu(512, 1024)),
        "linear, bfloat16": lambda: module(nn.Linear(1024, 4096, dtype=half), on_gpu(4096, 1024, dtype=half)),
        "conv2d": lambda: module(nn.Conv2d(64, 128, 3, padding=1), on_gpu(*image)),
        "conv2d, cudnn.benchmark": lambda: benchmarked(module(nn.Conv2d(64, 128, 3, padding=1), on_gpu(*image))),
        "conv_transpose2d": lambda: module(nn.ConvTranspose2d(64, 32, 2, stride=2), on_gpu(*image)),
        "LSTM": lambda: module(nn.LSTM(256, 256, 2), on_gpu(64, 32, 256)),
        "batch norm": lambda: module(nn.BatchNorm2d(64), on_gpu(*image)),
        "layer norm": lambda: module(nn.LayerNorm(1024), on_gpu(512, 1024)),
        "group norm": lambda: module(nn.GroupNorm(8, 64), on_gpu(*image)),
        "attention, flash (bfloat16)": lambda: attention(SDPBackend.FLASH_ATTENTION, half),
        "attention, cuDNN (bfloat16)": lambda: attention(SDPBackend.CUDNN_ATTENTION, half),
        "attention, memory-efficient": lambda: attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        "attention, math": lambda: attention(SDPBackend.MATH, torch.float32),
        "cross entropy": lambda: of(F.cross_entropy, on_gpu(4096, 50304), integers(50304, 4096)),
        "cross entropy of images": lambda: of(F.cross_entropy, on_gpu(8, 21, 256, 256), integers(21, 8, 256, 256)),
        "CTC loss": lambda: of(
            lambda x, y: F.ctc_loss(x.log_softmax(2), y, torch.full((16,), 200).cuda(), torch.full((16,), 40).cuda()),
            on_gpu(200, 16, 30),
            integers(28, 16, 40) + 1,
        ),
        "embedding": lambda: of(lambda w, i: F.embedding(i, w), on_gpu(1000, 256), integers(1000, 65536)),
        "embedding bag, max": lambda: of(
            lambda w, i: F.embedding_bag(i, w, mode="max"), on_gpu(1000, 256), integers(1000, 4096, 16)
        ),
        "indexing x[i]": lambda: of(lambda w, i: w[i], on_gpu(1000, 256), integers(1000, 65536)),
        "index_select": lambda: of(lambda w, i: w.index_select(0, i), on_gpu(1000, 256), integers(1000, 65536)),
        "gather": lambda: of(lambda w, i: w.gather(0, i), on_gpu(1000, 16), integers(1000, 65536, 16)),
        "index_add": lambda: of(
            lambda x, i: torch.zeros(100, 64).cuda().index_add(0, i, x), on_gpu(65536, 64), integers(100, 65536)
        ),
        "scatter_add": lambda: of(
            lambda x, i: torch.zeros(100, 64).cuda().scatter_add(0, i, x), on_gpu(65536, 64), integers(100, 65536, 64)
        ),
        "scatter_reduce, mean": lambda: of(
            lambda x, i: torch.zeros(100, 64).cuda().scatter_reduce(0, i, x, "mean"),
            on_gpu(65536, 64, grad=False),
            integers(100, 65536, 64),
        ),
        "cumsum": lambda: of(lambda x: x.cumsum(0), on_gpu(1 << 22)),
        "bincount with weights": lambda: of(
            lambda w, i: torch.bincount(i, w), on_gpu(1 << 20, grad=False), integers(50, 1 << 20)
        ),
        "max pool 2d": lambda: of(lambda x: F.max_pool2d(x, 3, 2), on_gpu(*image)),
        "max pool 2d, channels last": lambda: of(
            lambda x: F.max_pool2d(x, 3, 2),
            on_gpu(*image, grad=False).to(memory_format=torch.channels_last).requires_grad_(),
        ),
        "adaptive average pool 2d, to 1": lambda: of(lambda x: F.adaptive_avg_pool2d(x, 1), on_gpu(*image)),
        "adaptive average pool 2d, to 7": lambda: of(lambda x: F.adaptive_avg_pool2d(x, 7), on_gpu(*image)),
        "adaptive max pool 2d": lambda: of(lambda x: F.adaptive_max_pool2d(x, 10), on_gpu(*image)),
        "interpolate, nearest": lambda: of(lambda x: F.interpolate(x, scale_factor=2), on_gpu(*image)),
        "interpolate, bilinear": lambda: of(
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), on_gpu(*image)
        ),
        "reflection pad 2d": lambda: of(lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), on_gpu(*image)),
        "grid sample": lambda: of(
            lambda x, g: F.grid_sample(x, g, align_corners=False), on_gpu(*image), on_gpu(16, 56, 56, 2)
        ),
        "dropout, seeded": lambda: of(seeded(lambda x: F.dropout(x, 0.1)), on_gpu(4096, 1024)),
        "AdamW": lambda: adamw(),
        "AdamW, fused": lambda: adamw(fused=True),
    }


def benchmarked(case: Case) -> Case:
    def run() -> list[torch.Tensor]:
        torch.backends.cudnn.benchmark = True
        try:
            return case()
        finally:
            torch.backends.cudnn.benchmark = False

    return run


def seeded(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return function(x)

    return run


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def measure() -> dict[str, list[str] | str]:
    """Of every case the digests that were seen, or why there are none."""
    found: dict[str, list[str] | str] = {}
    for name, make in cases().items():
        torch.manual_seed(0)
        try:
            case = make()
            found[name] = sorted({digest(case()) for _ in range(TIMES)})
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
        torch.cuda.empty_cache()
    return found


def word(one: list[str] | str, other: list[str] | str) -> str:
    """What two processes found, in a word."""
    if isinstance(one, str) or isinstance(other, str):
        why = one if isinstance(one, str) else str(other)
        return "refused" if "deterministic" in why else f"cannot run: {why[:60]}"
    if len(one) == len(other) == 1:
        return "same" if one == other else "same within a process, differs between two"
    return f"differs ({max(len(one), len(other))} results of {TIMES})"


def child(deterministic: bool) -> dict[str, list[str] | str]:
    how = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if deterministic else {}
    command = [sys.executable, __file__, "deterministic" if deterministic else "default"]
    ran = subprocess.run(command, env={**os.environ, **how}, check=True, capture_output=True, text=True)
    found: dict[str, list[str] | str] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| operation, forward and backward | as it is | with use_deterministic_algorithms(True) |\n|---|---|---|")
    plain, strict = ([child(mode), child(mode)] for mode in (False, True))
    for name in plain[0]:
        print(f"| {name} | {word(plain[0][name], plain[1][name])} | {word(strict[0][name], strict[1][name])} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.use_deterministic_algorithms(sys.argv[1] == "deterministic")
        print(json.dumps(measure()))
    else:
        main()
