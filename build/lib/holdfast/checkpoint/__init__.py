"""Checkpoints: stores for bytes, snapshots of whole states, running checkpoints, writers, and verification."""
