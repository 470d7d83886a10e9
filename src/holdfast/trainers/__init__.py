"""Adapters for trainers that own their loop: Hugging Face's Trainer, Lightning's Trainer and Fabric."""
