"""Hugging Face's Trainer teaches a tiny GPT-2 to count."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from holdfast.trainers.transformers import protect

LENGTH, WORDS = 16, 32


def counting(begin: int, end: int) -> list[dict[str, torch.Tensor]]:
    """Rows of numbers: each begins somewhere and goes on by the same difference, around a circle."""
    rows = [(torch.arange(LENGTH) * (1 + number % 5) + number) % WORDS for number in range(begin, end)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train, then say how well the rows kept for the test are known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--folder", default="runs/trainer")
    options = parser.parse_args()

    set_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2, loss_type="ForCausalLM")
    arguments = TrainingArguments(
        output_dir=options.folder,
        num_train_epochs=options.epochs,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=4,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=counting(0, options.samples),
        eval_dataset=counting(options.samples, options.samples + 40),
    )
    protect(trainer)
    trainer.train()
    print(f"loss of rows never seen: {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
