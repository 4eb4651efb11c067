"""What the rollout engine needs of an environment: pure functions on one task or one episode."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from envsched_jax.types import PyTree


class Environment(NamedTuple):
    """A family of tasks as data: static sizes, and functions that the engine maps over ``B`` tasks and ``G`` rollouts.

    In one turn the policy samples a *call* of ``call_length`` tokens. Between its tokens, and after the last one, the
    environment says which ids the policy reads next: each position is a compound token of ``num_fields`` ids.
    """

    num_fields: int  # F, ids per position
    prompt_length: int  # P
    max_turns: int  # M
    call_length: int  # C, tokens per turn
    vocab_size: int  # V, ids that the policy can write: the first V of those that it reads
    start: jax.Array  # i32[F], the first position after the prompt
    prompt: Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # task i32[] -> ids i32[P, F], mask bool[P]
    reset: Callable[[jax.Array], PyTree]  # task i32[] -> state
    legal: Callable[[PyTree, jax.Array, int], jax.Array]  # state, call i32[C], j -> bool[V], never all false
    feed: Callable[[jax.Array, int], jax.Array]  # call i32[C], j -> i32[F], read after token j < C - 1
    step: Callable[[PyTree, jax.Array], tuple[PyTree, jax.Array, jax.Array]]  # -> state, i32[F], done bool[]
    verify: Callable[[PyTree], tuple[jax.Array, jax.Array]]  # state -> reward f32[], success bool[]
    bidirectional: bool = True  # prompt positions see each other both ways, as for a set of cards
