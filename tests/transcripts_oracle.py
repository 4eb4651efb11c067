"""Transcripts of any lengths, and their loss once more: every rollout read as a whole, in full arrays."""

import jax
import numpy as np

from envsched_jax.rollout.script import Transcript
from envsched_jax.train import grpo

WIDTH = 64  # of prompt and answers together


def make_group(task, prompt, lengths, seed, vocab=258):
    """Rollouts of random ids: answers and observations in turns, the first and the last an answer."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, vocab, prompt).tolist()
    group = []
    for member, length in enumerate(lengths):
        mask = [bool(i // 3 % 2 == 0 or i == length - 1) for i in range(length)]
        odds = np.where(mask, -rng.uniform(5.0, 6.0, length), 0.0)
        ids = rng.integers(0, vocab, length)
        group.append(Transcript(task, member, list(start), ids.tolist(), mask, odds.tolist()))
    return group


def whole(transcripts):
    """Returns ids [n, WIDTH] and where what follows the prompt stands, [n, T], and whether it is there."""
    longest = max(len(one.ids) for one in transcripts)
    ids = np.zeros((len(transcripts), WIDTH), np.int32)
    place = np.zeros((len(transcripts), longest), np.int32)
    there = np.zeros(place.shape, bool)
    for row, one in enumerate(transcripts):
        both = [*one.prompt, *one.ids]
        ids[row, : len(both)] = both
        place[row, : len(one.ids)] = np.arange(len(one.prompt), len(both))
        there[row, : len(one.ids)] = True
    return ids, place, there


def plain_log_probs(model, transcripts, temperature=1.0):
    """Returns log-probabilities f32[n, T] of what follows the prompts; anything behind their ends."""
    ids, place, _ = whole(transcripts)
    positions = np.broadcast_to(np.arange(WIDTH), ids.shape)
    hidden, _ = model.prefill(ids[:, :, None], positions, np.ones(ids.shape, bool), False)
    scores = jax.nn.log_softmax(model.logits(hidden) / temperature, axis=-1)
    rows = np.arange(len(ids))[:, None]
    return scores[rows, np.maximum(place - 1, 0), ids[rows, place]]


def plain_loss(model, groups, rewards, temperature=1.0, **options):
    """Returns GRPO's loss on all rollouts at once."""
    flat = [one for group in groups for one in group]
    logp = plain_log_probs(model, flat, temperature)
    mask, old = np.zeros(logp.shape, bool), np.zeros(logp.shape, np.float32)
    for row, one in enumerate(flat):
        mask[row, : len(one.ids)], old[row, : len(one.ids)] = one.mask, one.log_prob
    gain = [(np.asarray(given) - np.mean(given)) / (np.std(given) + 1e-4) for given in rewards]
    return grpo.loss(logp[None], old[None], np.concatenate(gain, dtype=np.float32)[None], mask[None], **options)
