"""Small models of labels given images, for tests."""

import dataclasses
import functools

import numpy as np
import torch
from torch import nn

from selfnorm.images import IMAGE_OPTIONS, ImageRegressor
from selfnorm.images.labels import LabelSpace
from selfnorm.images.model import GaussianHead, ImageEBM, ImageFeatures

SPACE = LabelSpace((30.0,), (10.0,), (0.5,), (60.5,), 1.0)


class Small(nn.Module):
    """Mean brightness of the four corners of an image."""

    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU())
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.net(nn.functional.adaptive_avg_pool2d(x, 2).mean(1).flatten(1))


def bright_images(n, seed=0, dim=1):
    """Counts that follow the brightness, with a second mode far away for a third of them."""
    rng = np.random.default_rng(seed)
    level = rng.uniform(0, 1, n)
    x = np.clip(level[:, None, None, None] * 200 + rng.normal(0, 5, (n, 3, 8, 8)), 0, 255)
    y = np.round(10 + 20 * level + 15 * (rng.uniform(size=n) < 1 / 3))
    if dim == 3:
        y = np.stack([y, -y, 0.1 * y], axis=1) + rng.normal(0, 0.3, (n, 3))
    return x.astype(np.uint8), y


def small_model(objective="snl", proposal="mdn-4", **options):
    chosen = {"n_samples": 16, "batch_size": 64, "max_epochs": 30, "lr": 1e-2, "dropout": 0.0}
    chosen |= {"backbone": Small(), "options": dataclasses.replace(IMAGE_OPTIONS, ema=None)}
    return ImageRegressor(objective, proposal, random_state=0, **{**chosen, **options})


def prepared_task(model, n=48):
    """The task of an untrained model, and a batch for it."""
    x, y = (torch.from_numpy(values) for values in bright_images(n))
    model.prepare(x, y[:, None])
    return model.task(), (x, model.space_.standardise(y[:, None]).float())


class Quadratic(nn.Module):
    broadcasts = True

    def forward(self, h, y):
        return 0.5 * (y.squeeze(-1) - h[..., 0]) ** 2


def quadratic_model():
    """Base N(0, 1), energy (z - h)^2 / 2: p(z|h) = N(h / 2, 1 / 2)."""
    proposal = GaussianHead(1)
    return ImageEBM(Quadratic(), proposal, log_norm=nn.Linear(1, 1), base="proposal")


def with_inner_model(inner, space, n_pixels, objective="snl"):
    """A regressor around a model that is known, on linear features of images."""
    model = small_model(objective)
    model.space_, model.flat_target_ = space, True
    model.model_ = inner
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(n_pixels, 1))
    inner.features = ImageFeatures(backbone).eval()
    return model


@functools.cache
def fitted_model():
    """SNL on bright images, trained once."""
    x, y = bright_images(400)
    torch.manual_seed(0)
    return small_model(max_epochs=15).fit(x[:320], y[:320], val=(x[320:], y[320:]))
