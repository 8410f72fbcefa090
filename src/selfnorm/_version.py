"""The version, written into every model folder: a file of its own, for all rooms to import."""

__version__ = "0.1.0"
