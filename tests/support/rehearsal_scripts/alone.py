"""A script that never attaches."""
