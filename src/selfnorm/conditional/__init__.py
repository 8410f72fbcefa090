"""``ConditionalEBM``: ``p(y|x)`` normalised for every ``x``, and the law of ``y`` on a grid."""
