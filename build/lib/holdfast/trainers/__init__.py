"""Adapters that protect Hugging Face's Trainer, Lightning's Trainer and Lightning Fabric."""
