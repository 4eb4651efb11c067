"""How likely the base policy is to lapse: the knob that makes pools like real ones.

Imitation of the solutions alone gives a policy that solves nearly everything. Real base policies know how to do a thing
and still fail in unfamiliar places, each place to its own degree. So the warm start imitates an expert that lapses
(submits early, or calls a random tool) with a probability that depends on topology and domain, which metadata tell, and
on the wording of the request, which they do not.
"""

import numpy as np

from envsched_jax.environments.toolworld.generator import ToolWorldConfig
from envsched_jax.environments.toolworld.topologies import TOPOLOGIES
from envsched_jax.environments.toolworld.vocabulary import STYLES

_TOPOLOGY_SPREAD = (-3.4, -2.2, -1.0, 0.2, 1.4, 2.2)  # logits; from nearly never to nearly always


def habits(config: ToolWorldConfig) -> np.ndarray:
    """Probability of a lapse per topology, domain and style.

    The logit is ``scale * (s * structural + sqrt(1 - s^2) * wording) + shift`` with ``s = config.structure``: 1 makes
    metadata tell all there is to tell, 0 nothing. Both parts have about the same spread.

    Returns:
      f64[6, num_domains, STYLES] in (0, 1).

    Raises:
      ValueError: if ``structure`` is not in [0, 1].
    """
    if not 0 <= config.structure <= 1:
        raise ValueError(f"structure={config.structure}: expected a number from 0 to 1")
    rng = np.random.default_rng([config.habit_seed, 500])
    topology = np.asarray(_TOPOLOGY_SPREAD)[rng.permutation(len(TOPOLOGIES))]
    domain = np.linspace(-2.2, 2.2, config.num_domains)[rng.permutation(config.num_domains)]
    structural = topology[:, None] + domain + 0.8 * rng.standard_normal((len(TOPOLOGIES), config.num_domains))
    wording = np.linspace(-4.2, 4.2, STYLES)[rng.permutation(STYLES)]
    part = config.structure * structural[:, :, None] + np.sqrt(1 - config.structure**2) * wording
    return 1 / (1 + np.exp(-np.clip(config.habit_scale * part + config.habit_shift, -4.0, 3.0)))
