"""Trains a tiny GPT-2 with Hugging Face's Trainer, sharded with FSDP2, as the task in the first argument says."""

import json
import os
import sys
from typing import Any

import torch
from accelerate import ParallelismConfig
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from holdfast.trainers.transformers import protect

ParallelismConfig._validate_accelerator = lambda *_: None  # it refuses CPUs
WORKERS = int(os.environ["WORLD_SIZE"])
LENGTH, WORDS = 8, 18


def counting(begin: int, end: int) -> list[dict[str, torch.Tensor]]:
    rows = [(torch.arange(LENGTH) * (1 + number % 5) + number) % WORDS for number in range(begin, end)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(task: dict[str, Any]) -> None:
    set_seed(0)
    dropout = task.get("dropout", 0.1)
    config = GPT2Config(
        **{"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 12, "n_layer": 2, "n_head": 2},
        **{"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout},
        **{"bos_token_id": None, "eos_token_id": None},
    )
    replicas = task.get("replicas", 1)
    hybrid = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=WORKERS // replicas)
    arguments = TrainingArguments(
        output_dir=task["folder"],
        max_steps=8,
        per_device_train_batch_size=8 // WORKERS,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=3,
        disable_tqdm=True,
        use_cpu=True,
        bf16=task.get("bf16", False),
        fsdp=True,
        fsdp_config={"activation_checkpointing": task.get("checkpointing", False)},
        parallelism_config=hybrid if replicas > 1 else None,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=counting(0, 64), eval_dataset=counting(64, 80))
    protect(trainer)
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
