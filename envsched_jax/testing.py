"""For tests, ours and yours: tiny graphs, large pools, simulated outcomes, and the laws every scheduler keeps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.belief.history import SUMS
from envsched_jax.pool.records import Record, Verifier
from envsched_jax.types import (
    CROSS_KINDS,
    EDGE_KINDS,
    WITHIN_KINDS,
    Batch,
    Edges,
    Globals,
    Graph,
    Key,
    Nodes,
    Outcome,
    PyTree,
    Scheduler,
    SchedulerState,
    Status,
)

TOLERANCE = 1e-5
_VERBS = "get list find search check read create update delete send book cancel move submit set add".split()
_VERIFIERS = ("state", "unit_tests", "match_per_turn", "answer")


class TinyGraph(NamedTuple):
    """The fields of ``types.Graph`` and no more."""

    nodes: Nodes
    edges: Edges
    senders: jax.Array
    receivers: jax.Array
    globals: Globals


def tiny_graph(
    n: int = 12, envs: int = 3, k: int = 3, seed: int = 0, capacity: int | None = None, patterns: int = 4, dim: int = 8
) -> TinyGraph:
    """Returns a random graph of ``n`` tasks, padded to ``capacity``: uneven environments, the nearest k per relation.

    Environments with fewer than k + 1 tasks have masked edges, as in a real graph.
    """
    rng = np.random.default_rng(seed)
    env = np.sort(np.concatenate([np.arange(envs), (rng.random(n - envs) ** 2 * envs).astype(np.int64)]))
    feature = rng.normal(size=(n, dim))
    feature /= np.linalg.norm(feature, axis=1, keepdims=True)
    same = env[:, None] == env[None, :]
    closeness = feature @ feature.T - 9.0 * np.eye(n)
    table = np.zeros((2 * k, n), np.int64)
    mask = np.zeros((2 * k, n), bool)
    for relation, allowed in enumerate((same & ~np.eye(n, dtype=bool), ~same)):
        for i in range(n):
            near = np.argsort(-np.where(allowed[i], closeness[i], -99.0), kind="stable")[: min(k, allowed[i].sum())]
            rows = slice(relation * k, relation * k + len(near))
            table[rows, i], mask[rows, i] = near, True
    similarity = rng.uniform(0.1, 1.0, size=(2 * k, n, len(EDGE_KINDS))) * mask[:, :, None]
    similarity[:k, :, len(WITHIN_KINDS) :] = 0.0
    similarity[k:, :, : -len(CROSS_KINDS)] = 0.0
    nodes = Nodes(
        mask=jnp.ones(n, bool),
        env=jnp.asarray(env, jnp.int32),
        pattern=jnp.asarray(rng.integers(0, patterns, n), jnp.int32),
        uid=jnp.asarray(rng.choice(2**32, n, replace=False), jnp.uint32),
        feature=jnp.asarray(feature, jnp.float32),
        static=jnp.asarray(rng.normal(size=(n, 3)), jnp.float32),
        checks=jnp.ones(n, jnp.int32),
    )
    graph = TinyGraph(
        nodes=nodes,
        edges=Edges(jnp.asarray(similarity.reshape(-1, len(EDGE_KINDS)), jnp.float32), jnp.asarray(mask.reshape(-1))),
        senders=jnp.asarray(table.reshape(-1), jnp.int32),
        receivers=jnp.tile(jnp.arange(n, dtype=jnp.int32), 2 * k),
        globals=Globals(jnp.ones(envs, bool), jnp.ones(patterns, bool)),
    )
    return graph if capacity is None else pad(graph, capacity)


def synthetic_pool(n: int, envs: int | None = None, seed: int = 0) -> list[Record]:
    """Returns n made-up records, about 40 us each: many environments, each with tools, words and workflows of its own.

    Environments have about n / envs tasks, the smallest a third and the largest twice as many; 50 are a domain and
    share nouns. A task follows one of its environment's four workflows, with a few actions more and some of them
    replaced, so topologies form clusters across environments, as in recorded pools. Every 4th task has a variant.

    Args:
      n: tasks.
      envs: environments, n / 100 by default.
      seed: of all draws.
    """
    rng = np.random.default_rng(seed)
    envs = max(1, n // 100) if envs is None else envs
    share = rng.gamma(12.0, size=envs)
    size = np.bincount(rng.choice(envs, n, p=share / share.sum()), minlength=envs)
    records: list[Record] = []
    for env, count in enumerate(size.tolist()):
        records += _synthetic_tasks(env, count, len(records), rng)
    return records


def _synthetic_tasks(env: int, count: int, first: int, rng: np.random.Generator) -> list[Record]:
    """Returns the tasks of one environment, numbered from ``first`` on."""
    nouns = [f"noun{noun}" for noun in env // 50 * 40 + rng.choice(40, 8, replace=False)]
    tools = tuple(dict.fromkeys(f"{_VERBS[v]}_{nouns[i % 8]}" for i, v in enumerate(rng.integers(0, 16, 20))))
    flows = [rng.integers(0, len(tools), length).tolist() for length in rng.integers(2, 9, 4)]
    verifiers = [
        Verifier(_VERIFIERS[kind], checks, kind == 1)
        for kind, checks in zip(rng.integers(0, 4, 4).tolist(), rng.integers(1, 9, 4).tolist(), strict=True)
    ]
    flow, turns, extra, variant = (rng.integers(0, high, count).tolist() for high in (4, 4, 4, 8))
    words = [f"word{w}" for w in (rng.pareto(1.0, (count, 16)) * 20).astype(np.int64).ravel() % 20_000]
    swaps = rng.integers(0, len(tools), (count, 4)).tolist()
    places = rng.integers(0, 32, (count, 2)).tolist()
    records = []
    for i in range(count):
        path = flows[flow[i]] + swaps[i][: extra[i]]
        for place in places[i]:
            if place < len(path):
                path[place] = swaps[i][3]
        actions = tuple(tools[a] for a in path)
        used = [name.split("_")[1] for name in actions]
        records.append(
            Record(
                task_id=f"task{first + i:07d}",
                env_id=f"env{env:05d}",
                text=" ".join(["Please", *words[16 * i : 16 * i + 10 + extra[i]], *used[:3]]),
                tools_available=tools,
                gt_actions=actions,
                n_turns=1 + turns[i],
                state_reads=tuple(dict.fromkeys(used[:3])),
                state_writes=tuple(dict.fromkeys(used[3:5])),
                verifier=verifiers[flow[i]],
                domain=f"domain{env // 50:03d}",
                group_id=f"scenario{env}.{variant[i]}" if extra[i] == 0 else None,
            )
        )
    return records


def pad(graph: Any, capacity: int) -> Any:
    """Returns the graph in a bucket of ``capacity`` nodes; the new rows are padding."""
    n = graph.nodes.mask.shape[0]
    extra, slots = capacity - n, graph.senders.shape[0] // n

    def wider(edge: jax.Array) -> jax.Array:
        table = edge.reshape(slots, n, *edge.shape[1:])
        return jnp.pad(table, ((0, 0), (0, extra)) + ((0, 0),) * (edge.ndim - 1)).reshape(-1, *edge.shape[1:])

    return graph._replace(
        nodes=jax.tree.map(lambda x: jnp.pad(x, ((0, extra),) + ((0, 0),) * (x.ndim - 1)), graph.nodes),
        edges=jax.tree.map(wider, graph.edges),
        senders=wider(graph.senders),
        receivers=jnp.tile(jnp.arange(capacity, dtype=jnp.int32), slots),
    )


def permute(graph: Any, order: jax.Array) -> Any:
    """Returns the same graph with other numbers: new node i is old node ``order[i]``."""
    n = graph.nodes.mask.shape[0]
    slots = graph.senders.shape[0] // n

    def columns(edge: jax.Array) -> jax.Array:
        return edge.reshape(slots, n, *edge.shape[1:])[:, order].reshape(edge.shape)

    return graph._replace(
        nodes=jax.tree.map(lambda x: x[order], graph.nodes),
        edges=jax.tree.map(columns, graph.edges),
        senders=jnp.argsort(order).astype(jnp.int32)[columns(graph.senders)],
    )


def simulate(key: Key, graph: Graph, batch: Batch, group_size: int, failures: float = 0.2) -> Outcome:
    """Returns what a made-up agent brings back: binary rewards, and failed rollouts that carry NaN.

    The pass rate of a task depends on its uid only: a third never, a third always, the others between.
    """
    shape = (batch.node.shape[0], group_size)
    streams = [jax.random.fold_in(key, i) for i in range(3)]
    level = (graph.nodes.uid[batch.node] % jnp.uint32(997)).astype(jnp.float32) / 997.0
    rate = jnp.clip(3.0 * level - 1.0, 0.0, 1.0)
    passed = jax.random.bernoulli(streams[0], rate[:, None], shape)
    failed = jax.random.bernoulli(streams[1], failures, shape)
    status = jnp.where(failed, jnp.int8(Status.ENV_ERROR), jnp.int8(Status.OK))
    status = jnp.where(batch.mask[:, None], status, jnp.int8(Status.ABSENT))
    return Outcome(
        node=batch.node,
        explore=batch.explore,
        reward=jnp.where(status == Status.OK, passed.astype(jnp.float32), jnp.nan),
        status=status,
        tokens=jax.random.uniform(streams[2], shape, minval=10.0, maxval=99.0),
        seconds=jnp.ones(shape, jnp.float32),
        age=jnp.zeros(shape[0], jnp.int32),
    )


def check_scheduler(
    scheduler: Scheduler,
    graph: Graph,
    key: Key,
    *,
    group_size: int = 4,
    eager: bool = True,
    ages: bool = False,
    numbers: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """Raises AssertionError, with the law's name, unless the scheduler keeps the laws of every recipe.

    Same result eager, jitted and vmapped; observing keeps structure, shapes and dtypes; no padded node, no repeat,
    and as many picks as there are eligible nodes; failed rollouts leave no trace in the statistics; renumbering the
    nodes renumbers the picks; a larger bucket changes nothing; one trace per bucket; no key is used twice; an outcome
    without rollouts changes only the step and the discount. These are laws of structure: they do not replace tests of
    values.

    Args:
      scheduler: the three functions.
      graph: a small graph whose number of nodes differs from its number of environments.
      key: consumed.
      group_size: rollouts per task in the simulated outcomes.
      eager: whether to run op by op too; most of the time goes there.
      ages: whether the recipe's own memory changes with every step, also with one that brings no rollouts.
      numbers: whether the recipe's memory holds numbers of nodes, so that renumbering takes more than moving its rows;
        the law of numbering is then left to a test of the recipe's own.
      tolerance: relative and absolute, of numbers; larger for a recipe that solves equations iteratively.
    """
    traces: list[str] = []

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        traces.append("select")
        return scheduler.select(key, graph, state)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        traces.append("observe")
        return scheduler.observe(graph, state, outcome)

    jitted = Scheduler(scheduler.init, jax.jit(select), jax.jit(observe))
    uid = graph.nodes.uid.astype(jnp.float32)
    state = scheduler.init(graph)._replace(truth=jnp.where(graph.nodes.mask, jnp.abs(jnp.sin(uid)), 0.0))
    for step in range(3):
        batch = jitted.select(jax.random.fold_in(key, step), graph, state)
        outcome = simulate(jax.random.fold_in(key, 1000 + step), graph, batch, group_size)
        before, state = state, jitted.observe(graph, state, outcome)
        _check_carry(before, state)
    key = jax.random.fold_in(key, 3)
    _check_counts(jitted, graph, key, state)
    _check_traces(traces)
    _check_outcomes(jitted, graph, state, outcome, ages, tolerance)
    _check_keys(scheduler, graph, key, state)
    if eager:
        selected, observed = scheduler.select(key, graph, state), scheduler.observe(graph, state, outcome)
        _assert_same("eager: select", jitted.select(key, graph, state), selected, tolerance)
        _assert_same("eager: observe", jitted.observe(graph, state, outcome), observed, tolerance)
    if not numbers:
        _check_numbering(jitted, graph, key, state, tolerance)
    _check_bucket(scheduler, jitted, graph, key, state, outcome, tolerance)


def _check_carry(before: SchedulerState, after: SchedulerState) -> None:
    structures = {str(jax.tree.structure(x)) for x in (before, after)}
    assert len(structures) == 1, "carry: observe changed the structure"
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype), "carry: observe changed a shape or dtype"


def _check_counts(jitted: Scheduler, graph: Any, key: Key, state: SchedulerState) -> None:
    """Exactly min(B, eligible) picks, all different and eligible; also after most tasks were retired."""
    few = jnp.cumsum(graph.nodes.mask) <= 2
    for mask in (graph.nodes.mask, graph.nodes.mask & few, jnp.zeros_like(few)):
        batch = jitted.select(key, graph._replace(nodes=graph.nodes._replace(mask=mask)), state)
        picked = np.asarray(batch.node)[np.asarray(batch.mask)]
        expected = min(batch.node.shape[0], int(mask.sum()))
        assert len(picked) == expected, f"count: {len(picked)} picks, {expected} tasks were to be had"
        assert len(set(picked.tolist())) == len(picked), "repeat: a task was picked twice"
        assert np.asarray(mask)[picked].all(), "padding: a node was picked that is not eligible"
        empty = ~np.asarray(batch.mask)
        assert not any(np.asarray(leaf)[empty].any() for leaf in batch), "padding: a row without a pick is not zero"


def _check_traces(traces: list[str]) -> None:
    assert sorted(traces) == ["observe", "select"], f"traces: one each per bucket, but {sorted(traces)}"


def _check_outcomes(
    jitted: Scheduler, graph: Graph, state: SchedulerState, outcome: Outcome, ages: bool, tolerance: float
) -> None:
    """What an outcome may and may not change."""
    after = jitted.observe(graph, state, outcome)
    for leaf in jax.tree.leaves(after):
        assert np.isfinite(np.asarray(leaf)).all(), "mask: a NaN under an invalid status got through"
    clean = outcome._replace(reward=jnp.where(outcome.status == Status.OK, outcome.reward, 0.0))
    _assert_same(
        "mask: what stands under an invalid status left a trace", after, jitted.observe(graph, state, clean), tolerance
    )

    absent = outcome._replace(status=jnp.full_like(outcome.status, Status.ABSENT), node=outcome.node + 10**6)
    failed = outcome._replace(status=jnp.full_like(outcome.status, Status.INFRA_ERROR))
    quiet, broken = jitted.observe(graph, state, absent), jitted.observe(graph, state, failed)
    ratios = []
    for name in SUMS:
        old, new = np.asarray(getattr(state.history, name)), np.asarray(getattr(quiet.history, name))
        ratios += (new[old != 0] / old[old != 0]).tolist()
        assert not new[old == 0].any(), "absent: statistics from nothing"
        _assert_same("failure: a failed rollout entered the statistics", new, getattr(broken.history, name))
    if ratios:
        assert max(ratios) - min(ratios) < TOLERANCE and 0.0 < max(ratios) <= 1.0 + TOLERANCE, (
            "absent: not one discount"
        )
    kept = quiet._replace(step=quiet.step - 1, history=state.history, memory=state.memory if ages else quiet.memory)
    _assert_same("absent: an outcome without rollouts changed more than step and discount", state, kept, tolerance)
    for name in ("visits", "last_step"):
        _assert_same(f"absent: {name} changed", getattr(state.history, name), getattr(quiet.history, name))


def _check_keys(scheduler: Scheduler, graph: Graph, key: Key, state: SchedulerState) -> None:
    """No key is consumed twice, as far as JAX's checker sees; traced anew, since it looks at traces.

    It does not see that two streams were folded in with the same number: that takes a test of values.
    """
    with jax.debug_key_reuse(True):
        try:
            jax.jit(lambda *args: scheduler.select(*args)).trace(key, graph, state)
        except jax.errors.KeyReuseError as error:
            raise AssertionError("keys: one was used twice") from error


def _check_numbering(jitted: Scheduler, graph: Any, key: Key, state: SchedulerState, tolerance: float) -> None:
    """The numbering of the nodes does not matter."""
    n = graph.nodes.mask.shape[0]
    order = jax.random.permutation(jax.random.fold_in(key, 2), n)
    moved = jax.tree.map(lambda x: x[order] if x.shape[:1] == (n,) else x, state)
    batch, other = jitted.select(key, graph, state), jitted.select(key, permute(graph, order), moved)
    other = other._replace(node=jnp.where(other.mask, order[other.node], 0))
    _assert_same("numbering: other picks", batch, other, tolerance)


def _check_bucket(
    scheduler: Scheduler,
    jitted: Scheduler,
    graph: Any,
    key: Key,
    state: SchedulerState,
    outcome: Outcome,
    tolerance: float,
) -> None:
    """A larger bucket changes nothing, and neither does vmap: both in one program, since compiling takes the time."""
    wide = pad(graph, graph.nodes.mask.shape[0] + 5)
    fresh = scheduler.init(wide)
    states = jax.tree.map(lambda x, y: jnp.stack([_copy_into(y, x), y]), state, fresh)
    keys = jnp.stack([key, jax.random.fold_in(key, 1)])
    batches = jax.jit(jax.vmap(scheduler.select, in_axes=(0, None, 0)))(keys, wide, states)
    after = jax.jit(jax.vmap(scheduler.observe, in_axes=(None, 0, None)))(wide, states, outcome)
    for row, (one_key, one_state) in enumerate(zip(keys, (state, scheduler.init(graph)), strict=True)):
        batch, new_state = (jax.tree.map(lambda x, i=row: x[i], tree) for tree in (batches, after))
        _assert_same("bucket or vmap: other picks", jitted.select(one_key, graph, one_state), batch, tolerance)
        small = jitted.observe(graph, one_state, outcome)
        _assert_same("bucket or vmap: observe", jax.tree.map(_copy_into, new_state, small), new_state, tolerance)


def _copy_into(large: jax.Array, small: jax.Array) -> jax.Array:
    return small if large.shape == small.shape else large.at[: small.shape[0]].set(small)


def _assert_same(law: str, first: PyTree, second: PyTree, tolerance: float = TOLERANCE) -> None:
    """Integers and flags must be equal, floats within the tolerance of float32 sums."""
    for path, (x, y) in zip(
        (p for p, _ in jax.tree.leaves_with_path(first)),
        zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True),
        strict=True,
    ):
        x, y = np.asarray(x), np.asarray(y)
        message = f"{law}: {jax.tree_util.keystr(path)}: {x} and {y}"
        assert x.shape == y.shape and x.dtype == y.dtype, message
        assert np.allclose(x, y, rtol=tolerance, atol=tolerance if x.dtype.kind == "f" else 0, equal_nan=True), message
