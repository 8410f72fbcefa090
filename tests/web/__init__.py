"""The site and a report in a real browser; see ``__main__``."""
