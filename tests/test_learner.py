"""Updates on conversations: steps of the optimiser along the oracle's gradient, on one device and on several."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chats import CONFIG
from flax import nnx
from test_load import model_of
from transcripts_oracle import make_group, plain_loss

from envsched_jax.policy import lora
from envsched_jax.train import grpo, learner, sharding
from envsched_jax.train.checkpoint import Checkpoints
from envsched_jax.train.learner import Learner

GROUPS = [
    make_group("a", 5, [7, 30, 1], 0),
    make_group("b", 12, [4], 1),
    make_group("c", 3, [20, 20, 9, 3], 2),
    make_group("d", 9, [6, 8], 3),
]
REWARDS = [[1.0, 0.0, 0.0], [1.0], [0.5, 0.1, 0.0, 1.0], [0.3, 0.3]]
ONE = sharding.make_mesh(devices=jax.devices()[:1])
SGD = grpo.make_optimizer("sgd", 0.5, max_norm=None)


def make(model=None, optimizer=SGD, **more):
    return Learner(model_of(CONFIG, 2) if model is None else model, optimizer, mesh=ONE, **more)


def close(found, wanted, atol=5e-6):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol)


def changed(before, after):
    return [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]


def host(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


def test_a_step_is_along_the_gradient_of_the_whole():
    model = model_of(CONFIG, 2)
    graphdef, params = nnx.split(model)
    teacher = make(model, temperature=0.8, part=2, clip_low=0.1, clip_high=0.3)
    state, figures = teacher.update(teacher.init(), GROUPS, REWARDS)

    def objective(params):
        return plain_loss(nnx.merge(graphdef, params), GROUPS, REWARDS, 0.8, clip_low=0.1, clip_high=0.3)

    value, gradient = jax.jit(jax.value_and_grad(objective))(params)
    close(state.trained, jax.tree.map(lambda x, g: x - 0.5 * g, params, gradient))
    assert (figures["groups"], figures["informative"]) == (4, 2)
    np.testing.assert_allclose(figures["loss"], value, atol=1e-6)
    np.testing.assert_allclose(figures["grad_norm"], optax.tree.norm(gradient), rtol=1e-4)
    assert 0.0 < figures["clip_fraction"] < 1.0 and figures["logp_gap"] > 0.1
    after = teacher.model(state)
    close(nnx.state(after), state.trained)
    assert after.config == model.config
    with pytest.raises(RuntimeError, match="once"):
        teacher.init()
    close(nnx.state(model), params)  # the model that was given is not taken over


def test_groups_that_are_left_out_count_in_the_size_of_a_step():
    size = [one.tokens for group in GROUPS for one in group]
    used = sum(one.tokens for i in (0, 2) for one in GROUPS[i])
    teacher = make(part=2)
    start = teacher.init()
    before = host(start.trained)
    all_of_them = host(teacher.update(jax.tree.map(jnp.copy, start), GROUPS, REWARDS)[0].trained)
    some = host(teacher.update(start, [GROUPS[0], GROUPS[2]], [REWARDS[0], REWARDS[2]])[0].trained)
    whole, part = (jax.tree.map(np.subtract, after, before) for after in (all_of_them, some))
    close(whole, jax.tree.map(lambda x: x * used / sum(size), part))
    assert used < sum(size)


def test_nothing_is_learnt_where_nothing_differs():
    teacher = make(optimizer=grpo.make_optimizer("adam", 0.1))
    start = teacher.init()
    for groups, rewards in (([GROUPS[1], GROUPS[3]], [[1.0], [0.3, 0.3]]), ([], [])):
        state, figures = teacher.update(start, groups, rewards)
        assert state is start and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        assert figures["informative"] == 0 and figures["groups"] == len(groups) and figures["grad_norm"] == 0.0
        assert set(figures) == {"groups", "informative", "loss", "grad_norm", "clip_fraction", "logp_gap"}


@pytest.mark.parametrize("std", ["group", "none", "batch"])
def test_advantages_of_groups_of_any_sizes(std):
    found = learner._gains(REWARDS, std)
    assert [len(gain) for gain in found] == [3, 1, 4, 2]
    rewards = np.concatenate(REWARDS)
    for gain, given in zip(found, map(np.asarray, REWARDS), strict=True):
        spread = {"group": given.std(), "none": 1.0, "batch": rewards.std()}[std]
        wanted = (given - given.mean()) / (spread + (1e-4 if std != "none" else 0.0))
        np.testing.assert_allclose(gain, wanted if given.std() else 0.0 * given, atol=1e-4)
    assert learner._gains([], std) == []


def test_small_steps_are_not_lost_in_bfloat16():
    model = model_of(dataclasses.replace(CONFIG, dtype="bfloat16"), 2)
    teacher = make(model, optimizer=grpo.make_optimizer("adam", 1e-6))
    state = teacher.init()
    before = host(state.trained)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(before)} == {"float32"}
    close(before, nnx.state(model), atol=0.0)
    for _ in range(3):
        state, _ = teacher.update(state, GROUPS, REWARDS)
    steps = jax.tree.map(lambda a, b: np.abs(a - b).max(), host(state.trained), before)
    assert all(0.0 < step < 1e-5 for step in jax.tree.leaves(steps))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(teacher.model(state)))} == {"bfloat16"}


def test_only_adapters_change():
    model = model_of(CONFIG, 2)
    teacher = make(model, lora_rank=3, lora_scale=2.0, optimizer=grpo.make_optimizer("adam", 0.01))
    state = teacher.init()
    first = host(nnx.state(teacher.model(state)))
    close(first, nnx.state(model), atol=0.0)  # b is 0: nothing has changed yet
    assert len(state.trained) == 2 * len(lora.TARGETS)
    assert all(thin["a"].shape[1] == thin["b"].shape[0] == 3 for thin in state.trained.values())
    assert len({float(thin["a"][0, 0]) for thin in state.trained.values()}) == len(state.trained)
    for _ in range(2):
        state, figures = teacher.update(state, GROUPS, REWARDS)
    assert figures["grad_norm"] > 0.0
    after = nnx.state(teacher.model(state))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(first)]
    moved = {name for name, moves in zip(names, changed(first, host(after)), strict=True) if moves}
    assert moved == {name for name in names if "'kernel'" in name}
    assert len(moved) == len(state.trained)
    kernel, thin = first["blocks"][1]["up"]["kernel"], state.trained["blocks/1/up/kernel"]
    np.testing.assert_allclose(
        after["blocks"][1]["up"]["kernel"][...], np.asarray(kernel) + 2.0 * thin["a"] @ thin["b"], atol=1e-6
    )
    close(nnx.state(model), first, atol=0.0)


def test_adapters_of_some_layers():
    params = nnx.state(model_of(CONFIG, 2))
    key = jax.random.key(0)
    assert sorted(lora.adapters(key, params, 2, ("q", "o"))) == [
        f"blocks/{i}/{name}/kernel" for i in "01" for name in "oq"
    ]
    with pytest.raises(ValueError, match="rank: expected at least 1, got 0"):
        lora.adapters(key, params, 0)
    for targets in ((), ("query",)):
        with pytest.raises(ValueError, match="targets: expected some of q, k, v, o, gate, up, down"):
            lora.adapters(key, params, 2, targets)


def test_the_gradient_of_adapters_is_that_of_the_product():
    model = model_of(CONFIG, 2)
    graphdef, params = nnx.split(model)
    teacher = make(model, lora_rank=2, lora_scale=0.5)
    start = teacher.init()
    thin = jax.tree.map(lambda x: x + 0.1, start.trained)
    before = host(thin)
    state, _ = teacher.update(learner.State(thin, start.opt_state), GROUPS, REWARDS)

    def objective(thin):
        return plain_loss(nnx.merge(graphdef, lora.adapt(thin, params, 0.5)), GROUPS, REWARDS)

    gradient = jax.jit(jax.grad(objective))(before)
    close(state.trained, jax.tree.map(lambda x, g: x - 0.5 * g, before, gradient))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_state_comes_back_from_a_checkpoint(rank, tmp_path):
    def fresh():
        return make(lora_rank=rank, optimizer=grpo.make_optimizer("adam", 0.01))

    teacher = fresh()
    state, _ = teacher.update(teacher.init(), GROUPS, REWARDS)
    with Checkpoints(tmp_path, {"a": 1}) as checkpoints:
        checkpoints.save(1, state, {})
    kept = host(state)
    state, _ = teacher.update(state, GROUPS, REWARDS)
    with Checkpoints(tmp_path, {"a": 1}) as checkpoints:
        again, _ = checkpoints.restore(fresh().init())
    assert jax.tree.structure(again) == jax.tree.structure(kept)
    close(again, kept, atol=0.0)
    again, _ = teacher.update(again, GROUPS, REWARDS)  # and goes on as if nothing had happened
    close(again, state, atol=0.0)


def test_arguments_out_of_range_are_named():
    with pytest.raises(ValueError, match="temperature: expected above 0"):
        make(temperature=0.0)
    with pytest.raises(TypeError):
        make(normalise="sequence")  # parts add up to means over ids only
    with pytest.raises(ValueError, match=r"mesh: 2 x 3 devices asked for, 1 are here"):
        sharding.make_mesh(2, 3, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="mesh: 0 x 1"):
        sharding.make_mesh(0)
    two = type("Two", (), {"shape": {"data": 2}})()
    with pytest.raises(ValueError, match="part: expected a multiple of the mesh's data axis 2, got 3"):
        Learner(model_of(CONFIG, 2), SGD, mesh=two, part=3)


PROGRAM = """
import dataclasses, sys
import jax, numpy as np
from chats import CONFIG
from test_load import model_of
from test_learner import GROUPS, REWARDS, grpo, learner, sharding, Learner
from jax.sharding import PartitionSpec as P
assert len(jax.devices()) == 4
jax.config.update("jax_numpy_rank_promotion", "raise")
config = dataclasses.replace(CONFIG, vocab_size=260)  # divides by 4
rank = int(sys.argv[1])

def learnt(data, model, extra=()):
    mesh = sharding.make_mesh(data, model)
    optimizer = grpo.make_optimizer("adam", 0.01, eps=0.1)
    teacher = Learner(model_of(config, 2), optimizer, mesh=mesh, part=4, lora_rank=rank)
    state, out = teacher.init(), []
    def places(tree):
        return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
    first = places(state)
    for _ in range(2):
        state, figures = teacher.update(state, GROUPS, REWARDS)
        out.append(figures)
        assert jax.tree.leaves(places(state)) == jax.tree.leaves(first), (places(state), first)
    sums = teacher._nothing(state.trained)
    assert jax.tree.leaves(places(sums.gradient)) == jax.tree.leaves(places(state.trained))
    policy = teacher.model(state)
    assert policy.embedding[...].sharding.spec == P("model", "data"), policy.embedding[...].sharding
    kernel = policy.blocks[0].down.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (24 // model, 16 // data)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)], out

wanted, figures = learnt(1, 1)
for shape in ((4, 1), (2, 2), (1, 4)):
    found, others = learnt(*shape)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=str(shape))
    for a, b in zip(others, figures, strict=True):
        assert a.keys() == b.keys() and all(abs(a[k] - b[k]) < 1e-4 for k in a), (a, b)
print("equal")
"""

AGENT = """
import dataclasses, functools
import jax, numpy as np
from chats import CONFIG
from flax import nnx
from test_agent import BABBLE, JOBS, LIMITS, Room, told
from test_load import model_of
from envsched_jax.rollout.agent import Agent
from envsched_jax.rollout import slots
from envsched_jax.train import sharding
jax.config.update("jax_numpy_rank_promotion", "raise")
made = []
seen = []
real = slots.decode_compiled
def spy(model, state, *rest, **more):
    seen.append({str(leaf.sharding.spec) for leaf in state.cache.k})
    return real(model, state, *rest, **more)
slots.decode_compiled = spy
for data, model in ((1, 1), (2, 2)):
    seen.clear()
    mesh = sharding.make_mesh(data, model)
    policy = model_of(CONFIG, 2)
    graphdef, params = nnx.split(policy)
    policy = nnx.merge(graphdef, jax.device_put(params, sharding.of_parameters(mesh, params)))
    place = functools.partial(sharding.place_slots, mesh)
    agent = Agent(BABBLE, LIMITS, slots=4, chunk=8, place=place)
    made.append(told(agent.play(policy, jax.random.key(1), JOBS[:5], Room)))
    assert len(set().union(*seen)) == 1, set().union(*seen)  # the caches stay where they were put
assert made[0] == made[1]
print("equal")
"""


def on_four_devices(program, *arguments):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        env=os.environ | flags | cache,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "2"])
def test_several_devices_learn_what_one_does(rank):
    on_four_devices(PROGRAM, rank)


@pytest.mark.slow
def test_several_devices_say_what_one_does():
    on_four_devices(AGENT)
