"""Samplers: one algorithm per file, each with ``State``, ``Info`` and pure ``init``/``step``.

================== ================================ =======================================
method             needs                            exact?
================== ================================ =======================================
``sir``            proposal                         as the number of candidates grows
``imh``            proposal                         as the number of steps grows
``rejection``      proposal, bound of the weights   yes
``mala``, ``hmc``  gradient, start from a proposal  as the steps grow
``smc``            proposal                         as the particles grow; estimates log Z
================== ================================ =======================================

:func:`draw` runs any of them; all randomness is torch's global stream.
"""

from selfnorm.sampling import adaptation, hmc, imh, mala, rejection, sir, smc
from selfnorm.sampling.driver import METHODS, Draws, chain_ess, draw, r_hat
from selfnorm.sampling.target import as_log_density, value_and_gradient

__all__ = [
    "METHODS",
    "Draws",
    "adaptation",
    "as_log_density",
    "chain_ess",
    "draw",
    "hmc",
    "imh",
    "mala",
    "r_hat",
    "rejection",
    "sir",
    "smc",
    "value_and_gradient",
]
