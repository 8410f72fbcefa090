"""The site, a report and the page of ``selfnorm explore`` in a real browser; see ``__main__``."""
