"""Live recovery: when workers are lost, the surviving workers continue without a restart."""
