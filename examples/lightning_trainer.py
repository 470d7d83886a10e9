"""Lightning's Trainer teaches a small network to tell which of two spirals a point is on."""

import argparse
import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

from holdfast.trainers.lightning import protect


class Spirals(L.LightningModule):
    """Three layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, y = batch
        self.log("right", (self.layers(x).argmax(dim=1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


def spirals(points: int, seed: int) -> data.TensorDataset:
    """Points on two spirals, with a little noise."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(points) % 2
    turn = 3 * math.pi * torch.rand(points, generator=draw)
    angle = turn + math.pi * y
    x = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 5
    return data.TensorDataset(x + 0.05 * torch.randn(points, 2, generator=draw), y)


def main() -> None:
    """Train, then say how many of the points kept for the test are told right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--points", type=int, default=1024)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    protect(trainer)
    trainer.fit(
        Spirals(),
        data.DataLoader(spirals(options.points, 1), batch_size=16, shuffle=True),
        data.DataLoader(spirals(256, 2), batch_size=64),
    )
    print(f"{trainer.callback_metrics['right']:.1%} of 256 points told right")


if __name__ == "__main__":
    main()
