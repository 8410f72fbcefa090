"""What a column of a table is: scale, grid, atoms, limits, and the map to units of models."""
