"""The experiments qp-bound, mlr-bound, mlr-reset and lda-reset: costs of perturbing a model, compared with proved limits."""
