"""Trains a small network with Lightning's Trainer, sharded with FSDP2, as the task in the first argument says."""

import json
import os
import sys
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from holdfast.trainers.lightning import protect

WORKERS = int(os.environ["WORLD_SIZE"])


class Classifier(L.LightningModule):
    """Three layers, of which the last has fewer rows than there are workers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 9), nn.Linear(9, 2))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

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


def points(number: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(number, 5, generator=draw), torch.randint(2, (number,), generator=draw))


def main(task: dict[str, Any]) -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        accelerator="cpu",
        devices=WORKERS,
        strategy=ModelParallelStrategy(data_parallel_size=WORKERS, tensor_parallel_size=1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    protect(trainer)
    train = DataLoader(points(64, 1), batch_size=8 // WORKERS, shuffle=True)
    trainer.fit(Classifier(task.get("dropout", 0.1)), train, DataLoader(points(16, 2), batch_size=4))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
