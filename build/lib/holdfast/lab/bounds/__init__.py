"""The cost of perturbing a model in training, against a proved bound: qp-bound, mlr-bound, mlr-reset and lda-reset."""
