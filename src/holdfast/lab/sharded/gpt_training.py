"""A small GPT that is trained with AdamW on bytes of text, one batch at a time, from any state."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.lab.sharded.shard_failures import GptSize
from holdfast.lab.sharded.training_text import TrainingText
from holdfast.live.sharded.lost_shards import RowState

BYTES = 256
WINDOWS = 48  # of held-out text, on which the validation loss is computed
AT_ONCE = 48  # sequences in a validation batch


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
    """A GPT with its AdamW optimizer, learning-rate warm-up, and batches that follow from a seed and a position."""

    def __init__(self, size: GptSize, text: TrainingText, seed: int, device: torch.device) -> None:
        self._size, self._seed, self._device = size, seed, device
        with torch.random.fork_rng([]):  # the first values are drawn on the CPU
            torch.default_generator.manual_seed(seed)
            self.model = Gpt(size).to(device)
        self._text = torch.from_numpy(text.trained).to(device)
        held_out = torch.from_numpy(text.held_out).to(device)
        spread = torch.linspace(0, len(held_out) - size.context - 1, WINDOWS).long().to(device)
        self._held_out = self._windows(held_out, spread)
        self._optimizer = adamw(self.model.parameters())
        self._steps = 0
        self._lowered = device.type == "cuda" and torch.cuda.is_bf16_supported()

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
        generator = torch.Generator().manual_seed((self._seed + 1_000_003 * position) % 2**63)
        last = len(self._text) - self._size.context - 1
        starts = torch.randint(last, (self._size.batch,), generator=generator).to(self._device)
        self._optimizer.zero_grad(set_to_none=True)
        self._mean_loss(self._windows(self._text, starts)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def apply_gradients(self) -> None:
        self._optimizer.param_groups[0]["lr"] = self.rate
        self._optimizer.step()
        self._steps += 1

    @torch.no_grad()
    def validation_loss(self) -> float:
        losses = [self._mean_loss(windows) for windows in self._held_out.split(AT_ONCE)]
        return float(torch.stack(losses).mean())

    def weights(self) -> list[Tensor]:
        """Return copies of all weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def state(self) -> GptState:
        return GptState(read_states(self._optimizer), self._steps)

    def load(self, state: GptState) -> None:
        load_states(self._optimizer, state.parameters, state.step)
        self._steps = state.step

    def _mean_loss(self, windows: Tensor) -> Tensor:
        tokens = windows.long()
        with self._autocast():
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.float().view(-1, BYTES), tokens[:, 1:].reshape(-1))

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._lowered else nullcontext()

    def _windows(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts[:, None] + torch.arange(self._size.context + 1, device=self._device)]


def weight_distance(weights: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the Euclidean distance between the weights of two states."""
    norms = [torch.linalg.vector_norm(own - other) for own, other in zip(weights, others, strict=True)]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW over `parameters`, with moments of zero and no step made."""
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for parameter in optimizer.param_groups[0]["params"]:
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
