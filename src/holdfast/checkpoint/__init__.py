"""Saving: where bytes live, whole snapshots, the running checkpoint, and finding what is bad."""
