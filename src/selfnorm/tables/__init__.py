"""``EnergyDensity`` and ``EnergyRegressor``: tables, behind the scikit-learn contract."""
