"""Pools over several devices and processes pick what one device picks."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from envsched_jax import testing
from envsched_jax.schedulers import sharding

# Plays some steps of a recipe over all devices there are and prints picks and beliefs.
PROGRAM = """
import sys
import jax
if len(sys.argv) > 3:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[3]}", num_processes=2, process_id=int(sys.argv[4]))
import numpy as np
from envsched_jax import schedulers, testing
from envsched_jax.schedulers import sharding
assert len(jax.devices()) == int(sys.argv[2]), jax.devices()
graph = testing.tiny_graph(60, envs=5, k=4, seed=2, capacity=64)
settings = {"batch_size": 8, "group_size": 4}
name, belief = sys.argv[1].split("-")
settings |= {"belief": belief} if belief else {}
scheduler = schedulers.make(name, **settings)
state = scheduler.init(graph)
over = sharding.mesh()
graph, state = (sharding.place(x, over, 64) for x in (graph, state))
if len(jax.devices()) > 1:
    assert not graph.nodes.uid.is_fully_replicated and not graph.senders.is_fully_replicated
select, observe = jax.jit(scheduler.select), jax.jit(scheduler.observe)
simulate = jax.jit(lambda key, graph, batch: testing.simulate(key, graph, batch, 4))
for step in range(6):
    key = jax.random.key(step)
    batch = select(key, graph, state)
    state = observe(graph, state, simulate(jax.random.fold_in(key, 1), graph, batch))
    host = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), batch)
    print("picked", host.node.tolist(), np.round(host.p_informative, 3).tolist(), flush=True)
"""


def start(recipe, devices, *arguments):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    total = devices * (2 if arguments else 1)
    command = [sys.executable, "-c", PROGRAM, recipe, str(total), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def picks(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-2000:]
    return [line for line in out.splitlines() if line.startswith("picked")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["uniform-", "envsched-diffusion", "envsched-gaussian_field"])
def test_eight_devices_pick_what_one_does(recipe):
    one, eight = (picks(start(recipe, devices)) for devices in (1, 8))
    assert len(one) == 6 and one == eight


@pytest.mark.slow
def test_two_processes_pick_what_one_does():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [start("envsched-diffusion", 2, port, process) for process in range(2)]
    first, second = (picks(process) for process in running)
    assert first == second == picks(start("envsched-diffusion", 1))


def test_rows_must_divide():
    one = sharding.mesh(jax.devices()[:1])
    graph = testing.tiny_graph(9, envs=2, k=2)
    placed = sharding.place(graph, one, 9)
    jax.tree.map(np.testing.assert_array_equal, graph, placed)
    two = type("Two", (), {"size": 2})()
    with pytest.raises(ValueError, match="nodes: 9 rows over 2 devices: expected a multiple"):
        sharding.place(graph, two, 9)
