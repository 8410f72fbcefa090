"""Figures of what they are given: arrays, records and public methods; needs matplotlib."""
