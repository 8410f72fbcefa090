"""Labels of images with their whole law: ``ImageRegressor``."""

from selfnorm.images.augmentation import Augmentation
from selfnorm.images.grid_law import GridLaw
from selfnorm.images.labels import dequantised
from selfnorm.images.model import PROPOSALS
from selfnorm.images.regressor import LAWS, ImageRegressor

__all__ = ["LAWS", "PROPOSALS", "Augmentation", "GridLaw", "ImageRegressor", "dequantised"]
