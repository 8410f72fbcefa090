"""Labels of images with their whole law: ``ImageRegressor``."""
