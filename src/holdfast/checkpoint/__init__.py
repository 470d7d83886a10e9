"""Checkpoints: stores for bytes, snapshots of whole states, checkpoints of single blocks, writers, and verification."""
