"""When does scheduling pay? Presets: `grid`, `smoke`, `sharp`.

`grid` (the default) makes groups degenerate by a hard pool, `sharp` by a policy that solves tasks always or never, on
the same grid with learning rates of its own; `smoke` takes a minute.
"""

from ml_collections import ConfigDict


def get_config(preset: str = "grid") -> ConfigDict:
    """Returns the configuration of `experiments.phase`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("grid", "smoke", "sharp"):
        raise ValueError(f"unknown preset {preset!r}; there are: grid, smoke, sharp")
    smoke = preset == "smoke"
    config = ConfigDict()
    config.seeds = 2 if smoke else 4  # at least 2: learning rates are chosen on one half and scored on the other
    config.steps = 6 if smoke else 120
    config.group_size = 8
    config.chunk = 8  # runs of one call; more do not fit the cache of a CPU

    # What the schedulers meet. The graph is built from the records alone, so all cells share it.
    config.world = ConfigDict()
    config.world.environments = 4 if smoke else 16
    config.world.new_environments = 2 if smoke else 4
    config.world.topologies = 2 if smoke else 4
    config.world.depths = 4
    config.world.copies = 2
    config.world.held_out_copies = 1
    # Squared shares of what a task takes. With these the tasks that are trained gain .19 and held-out ones of their
    # environments .13 in an epoch of uniform selection (.85 degenerate, scale-free, rate .32; SGD-like .13 and .08 at
    # 80, .32 and .24 at 160), about what the closed loop shows (.19-.22 and .14-.16); see `transfer` in the summary.
    config.world.general = 0.002
    config.world.environment = 0.02
    config.world.topology = 0.007
    config.world.directions = 32 if smoke else 256
    config.world.seed = 0
    config.world.graph = ConfigDict()
    config.world.graph.k = 4
    config.world.graph.num_patterns = 8 if smoke else 16
    config.world.graph.feature_dim = 16

    config.spread = 3.0  # deviation of the logits at the start; .5 is out of reach for more than about 3.4
    config.sharp = preset == "sharp"

    # The grid.
    config.batch_sizes = (4,) if smoke else (4, 13, 51)  # of 512: pool / 128, / 40, / 10
    config.degenerate = (0.5, 0.85) if smoke else (0.5, 0.7, 0.85, 0.95)
    config.structure = (0.0, 1.0) if smoke else (0.0, 0.5, 1.0)
    # Gradients are far below 1 by parameter: with epsilon 1 Adam is momentum SGD, and the update shrinks with the share
    # of informative groups; with a tiny one it has the same size whatever that share.
    slow, tiny = (5.0, 0.08) if preset == "sharp" else (40.0, 0.08)
    count = 2 if smoke else 6
    config.optimizers = ConfigDict()
    config.optimizers.sgd_like = ConfigDict({"eps": 1.0, "rates": tuple(slow * 2.0**i for i in range(count))})
    config.optimizers.scale_free = ConfigDict({"eps": 1e-8, "rates": tuple(tiny * 2.0**i for i in range(count))})
    config.middle = 1 if smoke else 2  # place of the learning rate that is shown by itself

    names = ("uniform", "envsched", "oracle", "learnability")
    if not smoke:
        names = (*names, "no_graph", "dump_ucb")
    config.arms = ConfigDict({name: {"name": name} for name in names})
    return config
