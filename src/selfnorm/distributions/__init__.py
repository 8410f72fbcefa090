"""Bases and proposals: Gaussians, mixtures, defensive ones, flows, density networks, adapters."""
