"""Data sets: synthetic ones with a known density, and loaders for the official file formats."""
