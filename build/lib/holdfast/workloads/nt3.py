"""NT3 (CANDLE): a 1-D convolutional network that classifies tissue as tumorous by its gene expression, and its data.

The benchmark's own tables are read if available; otherwise data of their shape are generated: 1,120 training and 280
test samples of 60,483 genes, two classes. Generated genes have different base levels and are correlated in groups, as
in real data, and some genes differ between the classes by about as much as between samples.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from holdfast.errors import Corrupt
from holdfast.workloads.fetch import data_folder

GENES, TRAIN, TEST = 60_483, 1_120, 280
TABLES = ("nt_train2.csv", "nt_test2.csv")  # the names under which CANDLE publishes them
PROGRAMS = 20  # groups of genes that vary together
DIFFERENT = 0.2  # of the genes differ between the classes
EFFECT = 1.0  # standard deviations between the classes, up or down

Reals = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """Gene expression data: samples in rows, genes in columns, scaled to [0, 1]; label 1 means tumorous."""

    x: Reals
    y: npt.NDArray[np.int64]


class NT3(nn.Module):
    """The NT3 network: two convolutions along the genes, pooling, and three linear layers (the first is largest)."""

    def __init__(self, genes: int = GENES, *, filters: int = 128, hidden: tuple[int, int] = (200, 20)) -> None:
        super().__init__()
        length = (genes - 19 - 9) // 10
        self.network = nn.Sequential(
            nn.Conv1d(1, filters, 20),
            nn.ReLU(inplace=True),
            nn.Conv1d(filters, filters, 10),
            nn.ReLU(inplace=True),
            nn.MaxPool1d(10),
            nn.Flatten(),
            nn.Linear(filters * length, hidden[0]),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Linear(hidden[0], hidden[1]),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Linear(hidden[1], 2),
        )
        for module in self.network:
            if isinstance(module, nn.Conv1d | nn.Linear):  # as in Keras, for which it was written
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.network(x[:, None])
        return scores


def generated(
    genes: int = GENES, train: int = TRAIN, test: int = TEST, *, different: float = DIFFERENT, effect: float = EFFECT
) -> tuple[Expression, Expression]:
    """Generate `train` training samples and `test` test samples of gene expression.

    The fraction `different` of the genes differs between the classes, by `effect` standard deviations."""
    rng = np.random.default_rng(genes)
    count = train + test
    y = rng.permuted(np.arange(count) % 2)
    x = rng.standard_normal((count, genes), dtype=np.float32)
    loadings = rng.standard_normal((PROGRAMS, genes), dtype=np.float32) / np.float32(PROGRAMS**0.5)
    x += rng.standard_normal((count, PROGRAMS), dtype=np.float32) @ loadings
    differs = rng.random(genes) < different
    effects = np.where(differs, rng.choice((-effect, effect), genes), 0.0)
    x += np.outer(y - 0.5, effects).astype(np.float32)
    scaled = _scaled(np.exp(x / 2, out=x))  # expression is skewed: a few samples have much of a gene
    return Expression(scaled[:train], y[:train]), Expression(scaled[train:], y[train:])


def tables(data: Path | None) -> tuple[Expression, Expression] | None:
    """Return CANDLE's own training and test tables from the data folder or its subfolder `nt3`.

    Return None if the tables are absent."""
    folder = data_folder(data)
    places = [] if folder is None else [folder / "nt3", folder]
    for place in places:
        if all((place / name).is_file() for name in TABLES):
            train, test = (_table(place / name) for name in TABLES)
            x = _scaled(np.concatenate([train[:, 1:], test[:, 1:]]))
            y = np.concatenate([train[:, 0], test[:, 0]]).astype(np.int64)
            return Expression(x[: len(train)], y[: len(train)]), Expression(x[len(train) :], y[len(train) :])
    return None


def tensors(part: Expression) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(part.x), torch.from_numpy(part.y)


def _table(path: Path) -> Reals:
    try:
        table: Reals = np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise Corrupt(f"{path} is not a table of numbers ({str(error).splitlines()[0]}): fetch it again.") from error
    if table.shape[1] < 2 or not np.isin(table[:, 0], (0, 1)).all():
        raise Corrupt(f"{path} does not have a class of 0 or 1 in its first column: fetch it again.")
    return table


def _scaled(x: Reals) -> Reals:
    x /= np.maximum(np.abs(x).max(axis=0), np.float32(1e-12))
    return x
