"""Energy-based models that are normalised: maximum likelihood without MCMC."""
