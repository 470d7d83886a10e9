"""What the scripts of the rehearsal's tests share: a tiny network, and points to learn."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, BATCH, EPOCHS = 16, 8, 3


def points() -> TensorDataset:
    """A few labelled points."""
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 6, generator=drawn), torch.randint(3, (SAMPLES,), generator=drawn))


def network() -> nn.Module:
    """Two layers with dropout between them."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
