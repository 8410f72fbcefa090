"""Can a number be trusted: bounds, log-weights, the verdict, quadrature, calibration."""
