"""The experiment advice-check: costs that `holdfast advise` predicts, compared with what failures then cost."""
