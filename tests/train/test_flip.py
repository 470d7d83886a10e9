"""The fault `flip`: it changes exactly one bit of the state, the same one every time, and names it."""

import pytest
import torch
from torch import nn

from holdfast.errors import BadInput
from holdfast.faults.schedule import Failure
from holdfast.train.flip import choose_flip
from holdfast.train.state.protected import Protected


def trained(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, Protected]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 5, 5, dtype=dtype)).square().sum().backward()
    optimizer.step()
    return model, optimizer, Protected({"model": model, "optimizer": optimizer})


def bits(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in tensors]
    return torch.cat(flat)


def flip(point: str, step: int = 5) -> Failure:
    return Failure(step=step, kind="flip", point=point, targets=(1,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bit", [0, 7, 15])
def test_one_bit_of_one_weight_changes(dtype: torch.dtype, bit: int) -> None:
    model, optimizer, protected = trained(dtype)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    before, moments_before = bits(list(model.parameters())), bits(moments)
    chosen = choose_flip(protected, flip(f"weight={bit}"), 1)
    chosen.apply()
    changed = before ^ bits(list(model.parameters()))
    assert [int(value).bit_count() for value in changed[changed != 0]] == [1]
    assert int(changed.max()) == 1 << (bit % 8)
    assert torch.equal(bits(moments), moments_before)
    assert str(chosen).startswith("model/")
    assert str(chosen).endswith(f" bit {bit}")


def test_one_bit_of_one_moment_changes_and_no_weight() -> None:
    model, optimizer, protected = trained()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    before, weights = bits(moments), bits(list(model.parameters()))
    chosen = choose_flip(protected, flip("moment=31"), 0)
    chosen.apply()
    changed = before ^ bits(moments)
    assert changed[changed != 0].tolist() == [128]
    assert torch.equal(bits(list(model.parameters())), weights)
    assert str(chosen).startswith("exp_avg")


def test_the_same_step_and_rank_flip_the_same_bit_and_others_another() -> None:
    chosen = [str(choose_flip(trained()[2], flip("boundary", step), rank)) for step, rank in [(5, 1), (5, 1), (6, 1), (5, 2)]]  # fmt: skip
    assert chosen[0] == chosen[1]
    assert len(set(chosen)) == 3


def test_a_bit_or_moment_that_does_not_exist_is_refused() -> None:
    model = nn.Linear(3, 3)
    protected = Protected({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    with pytest.raises(BadInput, match="flip cannot strike a moment in step 5: rank 1 protects no moment there"):
        choose_flip(protected, flip("moment"), 1)
    with pytest.raises(BadInput, match=r"flip cannot strike bit 32: model/.* has values of 32 bits, 0 to 31"):
        choose_flip(protected, flip("weight=32"), 1)
