"""What only a GPU shows. ``make test-gpu``, or ``PYTHONPATH=src python -m tests.gpu``.

Plain functions without pytest, so that a machine without it runs them, too: see ``__main__``.
"""
