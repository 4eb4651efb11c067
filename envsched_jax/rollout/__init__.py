"""Rollouts on the device: groups of episodes from a cached policy, and their log-probabilities."""

from envsched_jax.rollout.engine import Trajectory, evaluate, log_probs, rollout, score

__all__ = ["Trajectory", "evaluate", "log_probs", "rollout", "score"]
