"""Costs of perturbed states compared with a proved bound: qp-bound, mlr-bound, mlr-reset and lda-reset."""
