"""Memory is used again in the next step, and never twice in one step."""

import torch

from holdfast.live.sharded.host_memory import HostMemory


def test_tensors_of_a_step_are_apart_and_the_next_step_gets_their_memory_again() -> None:
    memory = HostMemory()
    taken = {memory.take(8, torch.float32).data_ptr() for _ in range(3)}
    assert len(taken) == 3
    memory.reclaim()
    assert {memory.take(8, torch.float32).data_ptr() for _ in range(3)} == taken


def test_memory_that_an_evaluation_has_taken_first_can_be_used_for_training() -> None:
    memory = HostMemory()
    with torch.inference_mode():
        memory.take(8, torch.float32)
    memory.reclaim()
    memory.take(8, torch.float32).copy_(torch.ones(8))


def test_memory_is_used_again_only_for_the_same_size_and_dtype() -> None:
    memory = HostMemory()
    memory.take(8, torch.float32)
    memory.reclaim()
    other = [memory.take(8, torch.float16), memory.take(4, torch.float32)]
    assert [(tensor.numel(), tensor.dtype) for tensor in other] == [(8, torch.float16), (4, torch.float32)]


def test_borrowed_memory_grows_to_the_largest_size_and_serves_all_dtypes() -> None:
    memory = HostMemory()
    large = memory.borrow(1000, torch.float32)
    memory.give_back(large)
    small = memory.borrow(10, torch.bfloat16)
    assert (small.numel(), small.dtype, small.data_ptr()) == (10, torch.bfloat16, large.data_ptr())
    assert memory.borrow(10, torch.bfloat16).data_ptr() != small.data_ptr()  # which is still borrowed
    memory.give_back(small)
    assert memory.borrow(1000, torch.float32).data_ptr() == large.data_ptr()
