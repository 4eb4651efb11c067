"""Decoding in slots: every sequence is what it would be alone, whatever shares the slots, and whatever was there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_load import CONFIGS, logits, model_of

from envsched_jax.rollout import slots as device
from envsched_jax.rollout.text import compiled, pad_prompts
from envsched_jax.train import transcripts

WIDTH = 96  # of the plain computation, so that it compiles once
MODEL = model_of(CONFIGS["qwen3"], 1)
VOCAB = MODEL.config.vocab_size
DRAWS = np.random.default_rng(0)
PROMPTS = [DRAWS.integers(0, VOCAB, size).tolist() for size in (3, 11, 2, 7)]


def plain(sequence, temperature=1.0, model=MODEL):
    """Log-probabilities after every id of a sequence, each recomputed from the whole."""
    whole = np.zeros((1, WIDTH), np.int32)
    whole[0, : len(sequence)] = sequence
    return np.asarray(jax.nn.log_softmax(logits(model, whole)[0] / temperature))[: len(sequence)]


def keys(*numbers):
    return jnp.stack([jax.random.fold_in(jax.random.key(7), number) for number in numbers])


def admitted(state, prompts, to, numbers, rows=4, width=16, model=MODEL):
    """Reads prompts into slots; what is left of `rows` is padding."""
    ids, length = np.zeros((rows, width), np.int32), np.full(rows, 2, np.int32)
    where = np.full(rows, len(state.length), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], length[row], where[row] = prompt, len(prompt), to[row]
    drawn = keys(*numbers, *[999] * (rows - len(prompts)))
    state = device.begin_compiled(state, ids[:, 0], where, drawn)
    return device.read_compiled(model, state, ids[:, 1:], length - 1, where)


def observed(state, texts, to, rows=2, width=8):
    ids, length = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
    where = np.full(rows, len(state.length), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)], length[row], where[row] = text, len(text), to[row]
    return device.read_compiled(MODEL, state, ids, length, where)


def decoded(state, budget, tokens=4, **more):
    return device.decode_compiled(MODEL, state, np.asarray(budget, np.int32), tokens=tokens, **more)


@pytest.mark.parametrize("family", CONFIGS)
def test_likeliest_ids_are_those_of_generation(family):
    model = model_of(CONFIGS[family], 3)
    ids, mask = pad_prompts(PROMPTS, 16)
    wanted = compiled(model, jax.random.key(0), ids, mask, tokens=8)
    state = admitted(device.empty(model, 5, 32), PROMPTS, [4, 0, 2, 1], range(4), model=model)
    state, out = device.decode_compiled(model, state, np.asarray([8, 8, 8, 0, 8]), tokens=8, temperature=0.0)
    np.testing.assert_array_equal(np.asarray(out.ids)[[4, 0, 2, 1]], wanted.ids[:, 0])
    np.testing.assert_allclose(np.asarray(out.log_prob)[[4, 0, 2, 1]], wanted.log_prob[:, 0], atol=1e-5)
    assert out.length.tolist() == [8, 8, 8, 0, 8] and not out.ended.any()
    assert not out.ids[3].any() and not out.log_prob[3].any()
    assert state.length.tolist() == [18, 14, 9, 0, 10]  # the last id is not read yet
    assert state.last[:3].tolist() == [row[-1] for row in out.ids[:3].tolist()]


def sampled(prompts, to, numbers, *, slots=4, capacity=32, chunks=(12,), wider=0, before=()):
    """Draws 12 ids after each prompt, in several calls; returns ids and log-probabilities."""
    state = device.empty(MODEL, slots, capacity)
    for prompt in before:  # the slots have been used
        state = admitted(state, [prompt] * slots, range(slots), range(90, 90 + slots))
        state, _ = decoded(state, [9] * slots, tokens=12)
    state = admitted(state, prompts, to, numbers)
    ids, odds = [], []
    for number, chunk in enumerate(chunks):
        if wider and number == 1:
            state = device.widen(state, wider)
        state, out = decoded(state, [chunk if slot in to else 0 for slot in range(slots)], tokens=12, temperature=1.3)
        ids.append(np.asarray(out.ids)[list(to), :chunk])
        odds.append(np.asarray(out.log_prob)[list(to), :chunk])
    return np.concatenate(ids, axis=1), np.concatenate(odds, axis=1)


def test_draws_belong_to_a_sequence_alone():
    ids, odds = sampled(PROMPTS, [0, 1, 2, 3], range(4))
    assert len({tuple(row) for row in ids}) == 4
    for row in range(4):
        alone, own = sampled([PROMPTS[row]], [2], [row])
        np.testing.assert_array_equal(alone[0], ids[row])
        np.testing.assert_allclose(own[0], odds[row], atol=1e-5)
    for row, prompt in enumerate(PROMPTS):  # a draw of its own at every position
        scores = plain([*prompt, *ids[row].tolist()], 1.3)[len(prompt) - 1 : -1]
        places = jnp.arange(len(scores)) + len(prompt) - 1
        drawn = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in, (None, 0))(keys(row)[0], places), scores)
        np.testing.assert_array_equal(drawn, ids[row])
    for other in (
        {"to": [3, 0, 1, 2]},
        {"slots": 6, "to": [5, 2, 0, 4]},
        {"capacity": 64},
        {"chunks": (4, 4, 4)},
        {"chunks": (5, 1, 6), "wider": 56},
        {"before": [PROMPTS[1], PROMPTS[3]]},  # what was there leaves no trace
    ):
        again, odds_again = sampled(**({"prompts": PROMPTS, "to": [0, 1, 2, 3], "numbers": range(4)} | other))
        np.testing.assert_array_equal(again, ids, err_msg=str(other))
        np.testing.assert_allclose(odds_again, odds, atol=1e-5)
    differs, _ = sampled(PROMPTS, [0, 1, 2, 3], [0, 1, 2, 5])
    assert (differs[:3] == ids[:3]).all() and (differs[3] != ids[3]).any()


def test_sequences_that_begin_alike_share_what_is_read():
    state = device.empty(MODEL, 4, 32)
    state = admitted(state, [PROMPTS[1]], [3], [0], rows=1)
    to = np.asarray([1, 4, 4], np.int32)  # the last two are padding
    state = device.copy_compiled(state, 3, to, keys(1, 2, 3))
    _, out = decoded(state, [0, 12, 0, 12], tokens=12, temperature=1.3)
    wanted, _ = sampled([PROMPTS[1]] * 2, [3, 1], [0, 1])
    np.testing.assert_array_equal(np.asarray(out.ids)[[3, 1]], wanted)
    assert (wanted[0] != wanted[1]).any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_is_recorded_is_what_a_teacher_finds(temperature):
    """Answers and observations in turns, sequences at different points; then everything at once, as for a gradient."""
    state = admitted(device.empty(MODEL, 4, 64), PROMPTS, range(4), range(4))
    ids, odds, mask = ([[] for _ in range(4)] for _ in range(3))
    for turn in range(3):
        budget = [[7, 3, 8, 1], [2, 8, 0, 5], [1, 1, 8, 4]][turn]
        state, out = decoded(state, budget, tokens=8, temperature=temperature)
        assert out.length.tolist() == budget
        for slot, count in enumerate(budget):
            ids[slot] += out.ids[slot, :count].tolist()
            odds[slot] += out.log_prob[slot, :count].tolist()
            mask[slot] += [True] * count
        for slot in {0: (0, 2), 1: (3, 1), 2: ()}[turn]:
            heard = DRAWS.integers(0, VOCAB, 3 + slot).tolist()
            state = observed(state, [heard], [slot])
            ids[slot] += heard
            odds[slot] += [0.0] * len(heard)
            mask[slot] += [False] * len(heard)
    assert state.length.tolist() == [len(p) + len(i) - 1 for p, i in zip(PROMPTS, ids, strict=True)]
    group = [transcripts.Transcript("a", i, PROMPTS[i], ids[i], mask[i], odds[i]) for i in range(4)]
    rows = next(iter(transcripts.to_parts([group], [[0.0] * 4], part=4)))
    found = np.asarray(transcripts.score(MODEL, rows, temperature))
    assert rows.mask.sum() == sum(map(sum, mask)) > 40
    np.testing.assert_allclose(np.where(rows.mask, found - rows.log_prob, 0.0), 0.0, atol=1e-5)


def test_rows_of_padding_change_nothing():
    state = admitted(device.empty(MODEL, 4, 32), PROMPTS, range(4), range(4))
    before = jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))
    state = observed(state, [], [])
    state, out = decoded(admitted(state, [], [], []), [0] * 4)
    after = jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert not any(np.any(leaf) for leaf in out)
    state = observed(state, [[5, 6, 7]], [2])  # nor do others change when one is read
    for was, now in zip(before.cache.k, state.cache.k, strict=True):
        np.testing.assert_array_equal(np.asarray(now)[[0, 1, 3]], was[[0, 1, 3]])
    assert state.length.tolist() == [2, 10, 4, 6] and int(state.last[2]) == 7


def test_turns_end_where_they_should():
    eos = tuple(range(30))
    state = admitted(device.empty(MODEL, 4, 48), PROMPTS, range(4), range(4))
    free, _ = sampled(PROMPTS, [0, 1, 2, 3], range(4))
    budget = [12, 12, 12, 2]
    state, out = decoded(state, budget, tokens=12, temperature=1.3, eos=eos)
    assert bool(out.ended[:3].any())
    for slot in range(4):
        ends = [i for i, id in enumerate(free[slot].tolist()) if id in eos]
        size = min(ends[0] + 1 if ends else 12, budget[slot])
        assert int(out.length[slot]) == size
        assert out.ids[slot].tolist() == [*free[slot, :size].tolist(), *[0] * (12 - size)]
        assert bool(out.ended[slot]) == bool(ends and ends[0] < budget[slot])
        assert not out.log_prob[slot, size:].any()
    length = state.length.tolist()
    assert length == [len(p) - 1 + int(n) for p, n in zip(PROMPTS, out.length, strict=True)]
    state, out = decoded(state, [0] * 4, tokens=12, temperature=1.3, eos=eos)
    assert out.length.tolist() == [0] * 4 and state.length.tolist() == length


def test_memory_is_taken_over():
    """Warnings about donated memory that cannot be used are errors here."""
    first = device.empty(MODEL, 4, 32)
    second = admitted(first, PROMPTS, range(4), range(4))
    third = observed(second, [[1, 2]], [0])
    fourth, _ = decoded(third, [2] * 4)
    for old in (first, second, third):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.cache))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(fourth))
    wide = device.widen(fourth, 40)
    assert wide.cache.k[0].shape == (4, 2, 8, 40) and wide.cache.v[0].shape == (4, 2, 40, 8)


ids_of = functools.partial(st.lists, st.integers(0, VOCAB - 1))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 2), ids_of(min_size=2, max_size=10)),
        st.tuples(st.just("read"), st.integers(0, 2), ids_of(min_size=1, max_size=8)),
        st.tuples(st.just("decode"), st.lists(st.integers(0, 6), min_size=3, max_size=3), st.just([])),
    ),
    min_size=3,
    max_size=10,
)


@given(STEPS)
@settings(max_examples=25, deadline=None)
def test_any_order_of_reading_and_sampling(steps):
    capacity = 40
    state, known = device.empty(MODEL, 3, capacity), {}
    for number, (kind, what, ids) in enumerate(steps):
        if kind == "admit":
            state, known[what] = admitted(state, [ids], [what], [number], rows=1), list(ids)
        elif kind == "read" and what in known and len(known[what]) + len(ids) < capacity:
            state = observed(state, [ids], [what], rows=1)
            known[what] += ids
        elif kind == "decode":
            budget = [min(what[i], capacity - len(known[i])) if i in known else 0 for i in range(3)]
            state, out = decoded(state, budget, tokens=6, temperature=0.9)
            assert out.length.tolist() == budget
            for slot, count in enumerate(budget):
                before = len(known.get(slot, ()))
                if count:
                    known[slot] += out.ids[slot, :count].tolist()
                    wanted = plain(known[slot], 0.9)[before - 1 : -1]
                    drawn = np.asarray(known[slot][before:])[:, None]
                    found = np.take_along_axis(wanted, drawn, axis=1)[:, 0]
                    np.testing.assert_allclose(out.log_prob[slot, :count], found, atol=2e-5)
    for slot, sequence in known.items():
        assert int(state.length[slot]) == len(sequence) - 1 and int(state.last[slot]) == sequence[-1]
