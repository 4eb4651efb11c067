"""A policy that learns from conversations: all its parameters or adapters, on one device or a mesh."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from envsched_jax.policy import lora
from envsched_jax.policy.transformer import Transformer
from envsched_jax.rollout.script import Transcript
from envsched_jax.train import sharding, transcripts
from envsched_jax.train.advantages import Std, advantages
from envsched_jax.types import Key, PyTree


class State(NamedTuple):
    """What learning changes; checkpointable."""

    trained: PyTree  # parameters, or adapters
    opt_state: optax.OptState


class Learner:
    """Compiled updates of one policy."""

    def __init__(
        self,
        model: Transformer,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh,
        temperature: float = 1.0,
        lora_rank: int = 0,
        lora_scale: float = 1.0,
        part: int = 1,
        std: Std = "group",
        seed: int = 0,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
    ) -> None:
        """Places the model on the mesh and compiles nothing yet.

        Args:
          model: is not kept.
          optimizer: of what is trained.
          mesh: from ``sharding.make_mesh``.
          temperature: at which rollouts are sampled, above 0.
          lora_rank: 0 trains every parameter.
          lora_scale: of the adapters.
          part: groups in one pass; a multiple of the mesh's data axis.
          std: of `advantages`.
          seed: of the adapters.
          clip_low: of `grpo.loss`, as the next one.
          clip_high: see there.

        Raises:
          ValueError: an argument is out of range.
        """
        if temperature <= 0.0:
            raise ValueError(f"temperature: expected above 0 for learning, got {temperature}")
        if part < 1 or part % mesh.shape["data"]:
            raise ValueError(f"part: expected a multiple of the mesh's data axis {mesh.shape['data']}, got {part}")
        self._mesh, self._part, self._std = mesh, part, std
        self._graphdef, params = nnx.split(model)
        params = jax.device_put(params, sharding.of_parameters(mesh, params))
        self._optimizer = optimizer
        key = jax.random.fold_in(jax.random.key(seed), 0)  # programs draw rollouts from other streams of the same seed
        first, self._fixed = divide(params, lora_rank, key)
        self._first: PyTree | None = jax.tree.map(jnp.copy, first)  # the model that was given keeps its memory
        merge = merger(model.config.dtype, lora_rank, lora_scale)
        options = {"clip_low": clip_low, "clip_high": clip_high}
        add = functools.partial(
            transcripts.add_part, graphdef=self._graphdef, merge=merge, temperature=temperature, options=options
        )
        # Where results lie is said, because the compiler would keep a sum of zeros on every device.
        trained, opt_state, sums = (
            sharding.of_parameters(mesh, jax.eval_shape(of, first))
            for of in (lambda x: x, optimizer.init, transcripts.nothing)
        )
        self._add = jax.jit(add, donate_argnames=("sums",), out_shardings=sums)
        self._apply = jax.jit(
            functools.partial(transcripts.apply, optimizer=optimizer),
            donate_argnames=("trained", "opt_state"),
            out_shardings=(trained, opt_state, None),
        )
        self._begin = jax.jit(optimizer.init, out_shardings=opt_state)
        self._nothing = jax.jit(transcripts.nothing, out_shardings=sums)
        self._whole = jax.jit(merge, out_shardings=sharding.of_parameters(mesh, params))
        self._place = trained

    def init(self) -> State:
        """Returns the state before the first update.

        Raises:
          RuntimeError: it was called before: updates take over the memory, of which there is no second copy.
        """
        if self._first is None:
            raise RuntimeError("init: to be called once")
        trained, self._first = jax.device_put(self._first, self._place), None
        return State(trained, self._begin(trained))

    def model(self, state: State) -> Transformer:
        """Returns the policy as it is now; it may share its memory with the state, which the next update takes over."""
        return nnx.merge(self._graphdef, self._whole(state.trained, self._fixed))

    def update(
        self, state: State, groups: Sequence[Sequence[Transcript]], rewards: Sequence[Sequence[float]]
    ) -> tuple[State, dict[str, float]]:
        """Takes one GRPO step on the groups that have an advantage; the others count in its size only.

        Args:
          state: given up.
          groups: rollouts of one task each, all with a reward.
          rewards: of each of them.

        Returns:
          the new state, the old one where no group is informative; and figures.
        """
        gains = _gains(rewards, self._std)
        teach = [i for i, gain in enumerate(gains) if np.any(gain)]
        total = jnp.asarray(float(sum(one.tokens for group in groups for one in group)), jnp.float32)
        figures = {"groups": len(groups), "informative": len(teach)}
        if not teach:
            return state, figures | {"loss": 0.0, "grad_norm": 0.0, "clip_fraction": 0.0, "logp_gap": 0.0}
        sums = self._nothing(state.trained)
        for rows in transcripts.to_parts([groups[i] for i in teach], [gains[i] for i in teach], self._part):
            placed = jax.device_put(rows, sharding.of_rows(self._mesh, rows))
            sums = self._add(sums, state.trained, self._fixed, placed, total)
        trained, opt_state, found = self._apply(state.trained, state.opt_state, sums)
        return State(trained, opt_state), figures | {name: float(value) for name, value in found.items()}


def divide(params: nnx.State, lora_rank: int, key: Key) -> tuple[PyTree, PyTree]:
    """Returns what is trained and what is not.

    What is trained is float32 also where the model is not: steps of 1e-6 vanish in bfloat16.
    """
    if lora_rank:
        return lora.adapters(key, params, lora_rank), params
    return jax.tree.map(lambda x: x.astype(jnp.float32), params), ()


def merger(dtype: str, lora_rank: int, lora_scale: float) -> transcripts.Merge:
    """Returns the inverse of `divide`: the parameters of the model."""
    return functools.partial(lora.adapt, scale=lora_scale) if lora_rank else functools.partial(_cast, dtype)


def _cast(dtype: str, trained: PyTree, fixed: PyTree) -> nnx.State:
    return jax.tree.map(lambda x: x.astype(dtype), trained)


def _gains(rewards: Sequence[Sequence[float]], std: Std) -> list[np.ndarray]:
    """Returns the advantages of groups of any sizes."""
    width = max((1, *map(len, rewards)))
    values, valid = np.zeros((len(rewards), width), np.float32), np.zeros((len(rewards), width), bool)
    for row, given in enumerate(rewards):
        values[row, : len(given)], valid[row, : len(given)] = given, True
    found = np.asarray(advantages(jnp.asarray(values), jnp.asarray(valid), std=std))
    return [found[row, : len(given)] for row, given in enumerate(rewards)]
