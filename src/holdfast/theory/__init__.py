"""The theory of perturbations: iteration cost bounds and convergence rates."""
