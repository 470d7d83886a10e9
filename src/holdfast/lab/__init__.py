"""Experiments, their results, figures and reports."""
