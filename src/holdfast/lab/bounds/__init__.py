"""The experiments qp-bound, mlr-bound, mlr-reset and lda-reset: how many additional iterations training needs after its state was changed, compared with a proved limit."""
