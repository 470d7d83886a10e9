"""Perturbations of a run beside the bound of Theorem 3.2: qp-bound, mlr-bound, mlr-reset and lda-reset."""
