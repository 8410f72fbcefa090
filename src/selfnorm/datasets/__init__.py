"""Data sets: synthetic ones with a known density, and loaders for the official file formats."""

from selfnorm.datasets.directory import find_file, find_set, listing

__all__ = ["find_file", "find_set", "listing"]
