"""The experiment recovery-matrix: real training runs under the same failures, each recovered in several ways."""
