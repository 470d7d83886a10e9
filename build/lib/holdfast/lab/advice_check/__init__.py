"""The experiment advice-check: compare the failure costs that `holdfast advise` predicts with measured costs."""
