"""Live recovery: the surviving workers continue without a restart."""
