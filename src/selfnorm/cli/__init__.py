"""The command line: ``selfnorm --help``."""

from selfnorm.cli.app import main

__all__ = ["main"]
