"""Samplers as pure functions: a step takes a state and returns a new one with what it saw.

================== ================================ =======================================
method             needs                            exact?
================== ================================ =======================================
``sir``            proposal                         as the number of candidates grows
``imh``            proposal                         as the number of steps grows
``mala``, ``hmc``  gradient, start from a proposal  as the steps grow
``smc``            proposal                         as the particles grow; estimates log Z
================== ================================ =======================================

:func:`draw` runs any of them; all randomness is torch's global stream.
"""

from selfnorm.sampling import smc
from selfnorm.sampling.driver import METHODS, Draws, chain_ess, correlation_time, draw, r_hat
from selfnorm.sampling.steps import (
    as_log_density,
    gradient_init,
    hmc_step,
    imh_step,
    mala_step,
    sir_step,
    value_and_gradient,
    weighted_init,
)

__all__ = [
    "METHODS",
    "Draws",
    "as_log_density",
    "chain_ess",
    "correlation_time",
    "draw",
    "gradient_init",
    "hmc_step",
    "imh_step",
    "mala_step",
    "r_hat",
    "sir_step",
    "smc",
    "value_and_gradient",
    "weighted_init",
]
