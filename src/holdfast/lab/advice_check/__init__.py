"""The experiment advice-check: costs of failures that `holdfast advise` predicts, beside the costs they then have."""
