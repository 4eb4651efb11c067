"""The main suite is like real pools: most groups teach nothing, and the base policy knows more than it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import toolworld as toolworld_config
from envsched_jax.environments import toolworld as tw
from envsched_jax.rollout.engine import evaluate
from envsched_jax.train import build


@pytest.mark.slow
def test_few_groups_teach_under_the_base_policy():
    config = toolworld_config.get_config()
    suite = build.build_suite(config)
    tasks = jnp.asarray(np.random.default_rng(0).permutation(suite.world.where(tw.TRAIN))[:512])

    def measure(params, temperature):
        model = nnx.merge(suite.graphdef, params)
        return evaluate(jax.random.key(1), model, suite.environment, tasks, group_size=8, temperature=temperature)

    base = jax.tree.map(lambda x: x[0], suite.bases)
    reward, success = jax.jit(measure)(base, config.train.temperature)
    informative = np.asarray(reward.max(1) > reward.min(1)).mean()
    never, always = np.asarray(~success.any(1)).mean(), np.asarray(success.all(1)).mean()
    assert 0.05 < informative <= 0.2
    assert never > always > 0.15
    assert never > 0.4
