"""``EBM``: model, objectives, ``fit``, many models at once, chunked and distributed, baselines."""
