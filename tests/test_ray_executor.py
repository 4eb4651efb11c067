import asyncio
import time

import pytest
import rollout_functions as rollouts

from envsched_jax.dispatch import RayExecutor, Ticket
from envsched_jax.pool import Record
from envsched_jax.types import Status

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@pytest.fixture(scope="module")
def cluster():
    path = {"env_vars": {"PYTHONPATH": rollouts.__file__.rsplit("/", 1)[0]}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=path)
    yield
    ray.shutdown()


def run_words(text, **settings):
    async def main():
        async with RayExecutor(rollouts.misbehave, **{"concurrency": 2, "deadline": 30.0} | settings) as executor:
            await executor.run(Ticket(0, "t", "e", 2, 0), Record("t", "e", "ok ok", ()))  # the workers are there
            begun = time.monotonic()
            given = await executor.run(Ticket(1, "t", "e", len(text.split()), 0), Record("t", "e", text, ()))
            return [Status(code).name.lower() for code in given.status], given, time.monotonic() - begun

    return asyncio.run(main())


def test_one_bad_rollout_costs_itself_only(cluster):
    found, given, _ = run_words("ok exit truncated raise segfault leave nothing ok")
    assert found[:5] == ["ok", "infra_error", "truncated", "env_error", "infra_error"]
    assert found[5:] == ["env_error", "infra_error", "ok"]
    assert given.rewards == (1.0, None, 1.0, None, None, None, None, 1.0)


def test_workers_do_not_need_this_library(cluster):
    async def main():
        async with RayExecutor(rollouts.who, concurrency=1, deadline=30.0) as executor:
            return await executor.run(Ticket(0, "t", "e", 1, 0), Record("t", "e", "", ()))

    assert asyncio.run(main()).tokens == (0.0,)  # JAX was not imported


def test_the_deadline_is_kept(cluster):
    found, given, passed = run_words("hang", deadline=3.0)
    assert found == ["env_timeout"] and given.seconds == (3.0,)
    assert 3.0 <= passed < 5.0
