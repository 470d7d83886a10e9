"""Live recovery: when workers are lost, the others continue without a restart."""
