"""Adapters with which Hugging Face's Trainer, Lightning's Trainer and Lightning Fabric can train in a run."""
