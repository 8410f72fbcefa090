"""Variational auto-encoders with energy-based priors, trained by the SNELBO."""
