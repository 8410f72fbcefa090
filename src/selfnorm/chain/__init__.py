"""``AutoregressiveEBM``: a chain of one-dimensional EBMs, its factors, training and bounds."""
