"""A GPT that is trained with AdamW on bytes of text, one batch at a time, from any state."""

import copy
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.lab.sharded.cuda_graphs import Recorder
from holdfast.lab.sharded.shard_failures import GptSize
from holdfast.lab.sharded.training_text import TrainingText
from holdfast.live.sharded.lost_shards import RowState

BYTES = 256
WINDOWS = 96  # of held-out text, on which the validation loss is computed
AT_ONCE = 48  # sequences in a validation batch
CHECKED = 4  # steps that recorded graphs must repeat before they are used
SAME = 0.3  # their result may differ by this part of the distance that the steps move the weights


class Attention(nn.Module):
    """A block of the transformer: causal attention and a network of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projected, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.projected(self.attention_norm(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(x.shape))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.network_norm(x))))
        return hidden


class Gpt(nn.Module):
    """A GPT on bytes."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Attention(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class GptState:
    """A copy of the weights and moments of all parameters, after `step` optimizer steps."""

    parameters: tuple[RowState, ...]
    step: int

    def weights(self) -> list[Tensor]:
        return [rows.weight for rows in self.parameters]


class GptTraining:
    """A GPT with its AdamW optimizer, learning-rate warm-up, and batches that follow from a seed and a position.

    A step reads its position and learning rate from tensors and changes all others in place, so that it can be recorded
    as CUDA graphs. The sum of the weights after some steps is kept beside it."""

    def __init__(
        self,
        size: GptSize,
        text: TrainingText,
        seed: int,
        device: torch.device,
        positions: int,
        record: Recorder | None = None,
    ) -> None:
        """Make a model with random weights, for batches at `positions` positions; `record` makes its steps faster."""
        self._size, self._device = size, device
        with torch.random.fork_rng([]):  # the first values are drawn on the CPU
            torch.default_generator.manual_seed(seed)
            self.model = Gpt(size).to(device)
            last = len(text.trained) - size.context - 1
            self._starts = torch.randint(last, (positions, size.batch)).to(device)
        self._mean_model = copy.deepcopy(self.model).requires_grad_(False)
        self._text = torch.from_numpy(text.trained).to(device)
        self._offsets = torch.arange(size.context + 1, device=device)
        held_out = torch.from_numpy(text.held_out).to(device)
        self._held_out = self._windows(held_out, torch.linspace(0, len(held_out) - size.context - 1, WINDOWS).long())
        self._optimizer = adamw(self.model.parameters())
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._sums = [torch.zeros_like(parameter) for parameter in self._mean_model.parameters()]
        self._steps = self._added = 0
        self._lowered = device.type == "cuda" and torch.cuda.is_bf16_supported()
        self._compute, self._apply, self._add = self._compute_eagerly, self._apply_eagerly, self._add_eagerly
        if record:
            self._record(record)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products, in which FSDP would gather the weights; the state itself is in float32."""
        return torch.bfloat16 if self._lowered else torch.float32

    @property
    def rate(self) -> float:
        """The learning rate of the next step: it rises during the warm-up, and is constant then."""
        return self._size.rate * min(1.0, (self._steps + 1) / self._size.warm_up)

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def train(self, position: int) -> None:
        """Make one step with the batch at `position`."""
        self.compute_gradients(position)
        self.apply_gradients()

    def compute_gradients(self, position: int) -> None:
        """Compute and clip the gradients of the batch at `position`."""
        self._position.fill_(position)
        self._compute()

    def apply_gradients(self) -> None:
        self._optimizer.param_groups[0]["lr"].fill_(self.rate)
        self._apply()
        self._steps += 1

    def validation_loss(self) -> float:
        return self._validation_loss(self.model)

    def add_weights(self) -> None:
        """Add the weights to those of which `averaged_loss` takes the mean."""
        self._add()
        self._added += 1

    @torch.no_grad()
    def averaged_loss(self) -> float:
        """Return the validation loss of the mean of the added weights, and forget them."""
        for parameter, total in zip(self._mean_model.parameters(), self._sums, strict=True):
            torch.div(total, self._added, out=parameter)
        self.forget_weights()
        return self._validation_loss(self._mean_model)

    def forget_weights(self) -> None:
        """Let `averaged_loss` take the mean of weights that are added from now on."""
        self._added = 0
        for total in self._sums:
            total.zero_()

    def weights(self) -> list[Tensor]:
        """Return copies of all weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def state(self) -> GptState:
        return GptState(read_states(self._optimizer), self._steps)

    def load(self, state: GptState) -> None:
        load_states(self._optimizer, state.parameters, state.step)
        self._steps = state.step

    def _record(self, record: Recorder) -> None:
        """Replace the three parts of a step by what `record` makes of them, if that is possible and computes the same."""
        first = self.state()
        try:
            expected = self._tried(first)
        except RuntimeError as error:  # an operation has no implementation that repeats exactly
            warnings.warn(f"training may not repeat exactly: {_first_line(error)}", stacklevel=2)
            torch.use_deterministic_algorithms(True, warn_only=True)
            expected = self._tried(first)
        eager = self._compute, self._apply, self._add
        try:
            self._compute, self._apply, self._add = record(eager)
            self.load(first)
            moved, error_size = (
                weight_distance(expected, first.weights()),
                weight_distance(self._tried(first), expected),
            )
            if not error_size <= SAME * moved:
                raise RuntimeError(f"replayed steps differ by {error_size:.3g} after moving the weights by {moved:.3g}")
        except RuntimeError as error:
            warnings.warn(f"steps are not recorded as CUDA graphs, which is slower: {_first_line(error)}", stacklevel=2)
            self._compute, self._apply, self._add = eager
        self.load(first)
        self.forget_weights()

    def _tried(self, first: GptState) -> list[Tensor]:
        """Return the weights after a few steps from `first`."""
        self.load(first)
        for position in range(CHECKED):
            self.train(position)
            self.add_weights()
        return self.weights()

    def _compute_eagerly(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        windows = self._windows(self._text, self._starts.index_select(0, self._position).view(-1))
        self._mean_loss(self.model, windows).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def _apply_eagerly(self) -> None:
        self._optimizer.step()

    @torch.no_grad()
    def _add_eagerly(self) -> None:
        for total, parameter in zip(self._sums, self.model.parameters(), strict=True):
            total.add_(parameter)

    @torch.no_grad()
    def _validation_loss(self, model: Gpt) -> float:
        losses = [self._mean_loss(model, windows) for windows in self._held_out.split(AT_ONCE)]
        return float(torch.stack(losses).mean())

    def _mean_loss(self, model: Gpt, windows: Tensor) -> Tensor:
        tokens = windows.long()
        with self._autocast():
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().view(-1, BYTES), tokens[:, 1:].reshape(-1))

    def _autocast(self) -> AbstractContextManager[object]:
        # Without a cache: every weight is used once, and a recorded graph must cast it again in every step.
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self._lowered else nullcontext()

    def _windows(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts.to(text.device)[:, None] + self._offsets]


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def weight_distance(weights: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the Euclidean distance between the weights of two states."""
    norms = [torch.linalg.vector_norm(own - other) for own, other in zip(weights, others, strict=True)]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW over `parameters`, with moments of zero, no step made, and a learning rate in a tensor."""
    trained = list(parameters)
    rate = torch.zeros((), device=trained[0].device)
    optimizer = torch.optim.AdamW(
        trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=rate.is_cuda
    )
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the moments; gradients and learning rate of zero change nothing
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def read_states(optimizer: torch.optim.AdamW) -> tuple[RowState, ...]:
    """Return copies of the weights and moments of all parameters of `optimizer`."""
    parameters, states = optimizer.param_groups[0]["params"], optimizer.state
    return tuple(
        RowState(
            parameter.detach().clone(),
            states[parameter]["exp_avg"].clone(),
            states[parameter]["exp_avg_sq"].clone(),
        )
        for parameter in parameters
    )


@torch.no_grad()
def load_states(optimizer: torch.optim.AdamW, states: Sequence[RowState], step: int) -> None:
    """Copy weights and moments into `optimizer` and its parameters, and set the number of steps made."""
    for parameter, rows in zip(optimizer.param_groups[0]["params"], states, strict=True):
        state = optimizer.state[parameter]
        parameter.copy_(rows.weight)
        state["exp_avg"].copy_(rows.first_moment)
        state["exp_avg_sq"].copy_(rows.second_moment)
        state["step"].fill_(float(step))
