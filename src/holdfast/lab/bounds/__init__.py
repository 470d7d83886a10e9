"""The experiments qp-bound, mlr-bound, mlr-reset and lda-reset: how many iterations a change of the state costs, and proved limits."""
