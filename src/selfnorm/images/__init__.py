"""Labels of images with their whole distribution: ``ImageRegressor``."""

from selfnorm.images.labels import dequantised
from selfnorm.images.model import PROPOSALS, WITHOUT_ENERGY, Augmentation, EnergyHead
from selfnorm.images.regressor import IMAGE_OPTIONS, ImageRegressor

__all__ = [
    "IMAGE_OPTIONS",
    "PROPOSALS",
    "WITHOUT_ENERGY",
    "Augmentation",
    "EnergyHead",
    "ImageRegressor",
    "dequantised",
]
