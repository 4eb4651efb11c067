"""The graph: exact neighbours with ties, numbering, padding and rewiring."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest

from envsched_jax import graph, pool
from envsched_jax.graph import features
from envsched_jax.pool import PoolError, Record, Verifier
from envsched_jax.types import EDGE_KINDS

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
K = 4
VERBS = ("get_user", "set_user", "list_flights", "book_flight", "search", "sendMail")


def make_record(i, env, rng):
    tools = tuple(VERBS[j] for j in sorted(rng.choice(len(VERBS), 3, replace=False)))
    return Record(
        task_id=f"task-{i}",
        env_id=f"env-{env}",
        text=" ".join(rng.choice(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"], rng.integers(2, 6))),
        tools_available=tools,
        gt_actions=tuple(rng.choice(tools, rng.integers(1, 4))) if i % 7 else None,
        n_turns=int(rng.integers(1, 3)) if i % 5 else None,
        state_reads=(f"s{i % 3}",) if i % 4 else None,
        state_writes=(f"s{i % 2}",) if i % 4 else None,
        verifier=Verifier("state" if i % 2 else "per_step", int(rng.integers(1, 5)), bool(i % 2)) if i % 6 else None,
        domain=f"domain-{env % 2}",
        group_id=f"group-{i % 40}" if i % 3 == 0 else None,
    )


@functools.cache
def records():
    """Environments of 1, 3, 30, 90 and 196 tasks, so that windows of the search start inside and across blocks."""
    rng = np.random.default_rng(0)
    envs = np.repeat([0, 1, 2, 3, 4], [1, 3, 30, 90, 196])
    return tuple(make_record(i, env, rng) for i, env in enumerate(rng.permutation(envs)))


@functools.cache
def built():
    return graph.build(records(), k=K, num_patterns=8, feature_dim=32)


def table(g, x=None, k=K):
    return np.asarray(g.senders if x is None else x).reshape(2 * k, g.nodes.mask.shape[0], *np.shape(x)[1:])


def by_name(g, index, k=K):
    """The graph in words: everything about a task that does not depend on its number."""
    senders, mask, similarity = table(g, k=k), table(g, g.edges.mask, k), table(g, g.edges.similarity, k)
    nodes = jax.tree.map(np.asarray, g.nodes)
    return {
        task_id: {
            "edges": [
                (index.task_ids[senders[s, i]], *similarity[s, i].tolist()) if mask[s, i] else None
                for s in range(2 * k)
            ],
            "env": index.env_ids[nodes.env[i]],
            "pattern": int(nodes.pattern[i]),
            "uid": int(nodes.uid[i]),
            "feature": nodes.feature[i].tolist(),
            "checks": int(nodes.checks[i]),
        }
        for i, task_id in enumerate(index.task_ids)
    }


# ---------------------------------------------------------------- the oracle


def oracle_hash(receiver, sender):
    """24 bits of MurmurHash3's finaliser of the pair, salt 0, in Python's integers."""
    x = (receiver * 0x9E3779B1 + sender) % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return (x ^ (x >> 16)) >> 8


def oracle_similarity(rows, a, b, i, j):
    """All kinds between tasks i and j in float64: inner products of the features cut to [0, 1]."""
    cut = [min(max(float(np.dot(x[i].astype(np.float64), x[j].astype(np.float64))), 0.0), 1.0) for x in rows[:6]]
    twin = (a.group_id is not None and a.group_id == b.group_id) or (cut[0] >= 0.95 and cut[1] >= 0.95)
    return [*cut[:4], float(twin), *cut[4:]]


def test_neighbours_equal_brute_force_with_ties():
    g, index = built()
    rows = features.extract([records()[i] for i in index.record], 32, 0)
    senders, mask, similarity = table(g), table(g, g.edges.mask), table(g, g.edges.similarity)
    uid = [graph.task_uid(t) for t in index.task_ids]
    ties = 0
    for i in range(0, len(uid), 3):
        a = records()[index.record[i]]
        within, cross = [], []
        for j in range(len(uid)):
            b = records()[index.record[j]]
            if i == j:
                continue
            kinds = oracle_similarity(rows, a, b, i, j)
            products = [float(np.dot(x[i].astype(np.float64), x[j].astype(np.float64))) for x in rows[:6]]
            if a.env_id == b.env_id:
                mean = (max(products[0], 0.0) + sum(products[1:4])) / 4
                within.append((kinds[4], mean, oracle_hash(uid[i], uid[j]), j, [*kinds[:5], 0, 0]))
            else:
                cross.append((sum(products[4:]), oracle_hash(uid[i], uid[j]), j, [0] * 5 + kinds[5:]))
        for first, found in ((0, sorted(within, reverse=True)), (K, sorted(cross, reverse=True))):
            best = found[:K]
            assert mask[first : first + K, i].sum() == len(best)
            assert [int(s) for s in senders[first : first + K, i]] == [b[-2] for b in best] + [i] * (K - len(best))
            expected = np.array([b[-1] for b in best]).reshape(-1, len(EDGE_KINDS))
            np.testing.assert_array_equal(similarity[first : first + len(best), i], expected)
            ties += len(found) > K and found[K - 1][:-3] == found[K][:-3]
    assert ties > 50  # the last place was shared: the hash decided


def test_ties_are_broken_without_hubs():
    """200 tasks of one topology in each of two environments: every sender is drawn about K times, none far more."""
    same = [Record(f"t{i}", f"e{i % 2}", "", ("a",), ("a",), 1, verifier=Verifier("v", 1)) for i in range(400)]
    g, _ = graph.build(same, k=K)
    uses = np.bincount(table(g)[K:, :400].reshape(-1), minlength=400)
    assert uses.sum() == 400 * K
    assert uses.max() < 16  # Poisson(4): P(any of 400 above 15) is below 0.1 %
    assert (uses == 0).mean() < 0.06  # exp(-4) is 0.018


def test_variants_of_a_scenario_come_first():
    base = [Record(f"t{i}", "e", f"about {'xyzuvw'[i]}", (f"tool{i}",)) for i in range(6)]
    base[3] = dataclasses.replace(base[3], group_id="g")
    base[0] = dataclasses.replace(base[0], group_id="g")
    base.append(Record("t6", "e", base[1].text, base[1].tools_available))  # the same words and tools
    g, index = graph.build(base, k=2)
    senders, similarity = table(g, k=2), table(g, g.edges.similarity, k=2)
    for a, b in (("t0", "t3"), ("t3", "t0"), ("t1", "t6"), ("t6", "t1")):
        assert index.task_ids[senders[0, index.node_of(a)]] == b
        assert similarity[0, index.node_of(a), 4] == 1
    assert similarity[1, :7, 4].sum() == 0


# ---------------------------------------------------------------- numbering and padding


def test_nodes_are_numbered_by_domain_environment_and_task():
    g, index = built()
    named = [records()[i] for i in index.record]
    assert [r.task_id for r in named] == list(index.task_ids)
    key = [(r.domain, r.env_id, r.task_id) for r in named]
    assert key == sorted(key)
    env = np.asarray(g.nodes.env)[: len(named)]
    assert [index.env_ids[e] for e in env] == [r.env_id for r in named]
    assert (np.diff(env) >= 0).all()
    assert index.node_of(index.task_ids[17]) == 17
    with pytest.raises(KeyError, match="nobody"):
        index.node_of("nobody")


def test_checks_count_only_where_the_verifier_gives_partial_credit():
    verifiers = [None, *(Verifier("v", *x) for x in ((), (3,), (3, False), (3, True), (0, True), (None, True)))]
    pool = [Record(f"t{i}", "e", "", (), verifier=v) for i, v in enumerate(verifiers)]
    g, _ = graph.build(pool, k=2, num_patterns=2, feature_dim=4)
    assert g.nodes.checks.dtype == jnp.int32 and g.nodes.checks.tolist() == [1, 1, 1, 1, 3, 1, 1, 0]


def test_order_of_records_changes_nothing():
    order = np.random.default_rng(1).permutation(len(records()))
    shuffled = [records()[i] for i in order]
    g, index = graph.build(shuffled, k=K, num_patterns=8, feature_dim=32)
    assert by_name(g, index) == by_name(*built())
    assert [shuffled[i].task_id for i in index.record] == list(index.task_ids)


def test_a_larger_capacity_changes_nothing_on_real_nodes():
    g, index = graph.build(records(), k=K, num_patterns=8, feature_dim=32, capacity=500, env_capacity=20)
    assert by_name(g, index) == by_name(*built())
    n = len(records())
    assert g.nodes.mask.shape == (500,) and g.globals.env_mask.shape == (20,)
    assert int(g.nodes.mask.sum()) == n and int(g.globals.env_mask.sum()) == 5
    for leaf in jax.tree.leaves(g.nodes):
        assert not np.asarray(leaf)[n:].any()
    assert not table(g, g.edges.mask)[:, n:].any()
    assert not table(g, g.edges.similarity)[:, n:].any()
    assert (table(g)[:, n:] == np.arange(n, 500)).all()


def test_tasks_are_added_behind_the_old_ones():
    rng = np.random.default_rng(2)
    old = records()[:310]
    new = [*records()[310:], make_record(900, 7, rng), make_record(901, 3, rng)]
    first, before = graph.build(old, k=K, num_patterns=8, feature_dim=32, capacity=352)
    together = [*new, *old]
    g, index = graph.build(together, k=K, num_patterns=8, feature_dim=32, keep=before)
    assert index.task_ids[:310] == before.task_ids
    assert index.env_ids[: len(before.env_ids)] == before.env_ids
    assert [together[i].task_id for i in index.record] == list(index.task_ids)
    assert jax.tree.map(jnp.shape, g) == jax.tree.map(jnp.shape, first)  # so nothing compiles again
    assert by_name(g, index) == by_name(*graph.build(together, k=K, num_patterns=8, feature_dim=32))
    with pytest.raises(ValueError, match=r"keep: 20 of its tasks have no record, the first is 'task-\d+': expected"):
        graph.build(together[:-20], k=K, keep=before)


def test_small_pools_have_fewer_edges_and_no_edge_is_wrong():
    one = [Record("a", "e", "x", ())]
    g, _ = graph.build(one, k=3)
    assert not np.asarray(g.edges.mask).any()
    assert int(g.nodes.mask.sum()) == 1
    three = [Record(t, "e", t, ("x",)) for t in "abc"]
    g, _ = graph.build(three, k=3)
    mask = table(g, g.edges.mask, k=3)
    assert (mask.sum(axis=0)[:3] == 2).all() and not mask[3:].any()  # one environment: no cross edges
    assert sorted(table(g, k=3)[:2, 0].tolist()) == [1, 2]


def test_more_neighbours_than_a_block_of_the_search():
    many = [Record(f"t{i}", f"e{i % 2}", "", ()) for i in range(20)]
    g, _ = graph.build(many, k=300)
    assert table(g, g.edges.mask, k=300).sum(axis=0)[:20].tolist() == [19] * 20


def test_errors_name_what_was_expected():
    two = [Record("a", "e", "", ()), Record("b", "f", "", ())]
    for bad, options, error, message in [
        ([], {}, PoolError, "records: the pool is empty"),
        ([two[0], two[0]], {}, PoolError, "records 1 and 2: field 'task_id': both are 'a'"),
        (two, {"capacity": 1}, ValueError, "capacity=1: expected room for 2 tasks"),
        (two, {"env_capacity": 1}, ValueError, "env_capacity=1: expected room for 2 environments"),
        (two, {"k": 0}, ValueError, "k=0, num_patterns=32, feature_dim=64: expected at least 1 each"),
    ]:
        with pytest.raises(error, match=message):
            graph.build(bad, **options)


def test_buckets_have_little_slack_and_are_few():
    sizes = [graph.bucket(n) for n in range(1, 5000)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * n for n, size in enumerate(sizes, 1) if n > 32)
    assert sizes[0] == 8 and len(set(sizes)) < 45
    assert [graph.bucket(s) for s in sizes] == sizes


# ---------------------------------------------------------------- jraph and rewiring


def test_segment_sum_over_edges_equals_the_gather_table():
    g, _ = built()
    assert isinstance(g, jraph.GraphsTuple)
    n = g.nodes.mask.shape[0]
    assert int(g.n_node.sum()) == n and int(g.n_edge.sum()) == 2 * K * n
    x = jax.random.normal(jax.random.key(0), (n, 3))
    w = g.edges.similarity.sum(axis=1) * g.edges.mask.astype(jnp.float32)
    scattered = jax.ops.segment_sum(w[:, None] * x[g.senders], g.receivers, n)
    gathered = jnp.einsum("kn,knc->nc", w.reshape(2 * K, n), x[g.senders.reshape(2 * K, n)])
    np.testing.assert_allclose(scattered, gathered, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(gathered).max()) > 0.1

    update = jraph.GraphNetwork(
        update_edge_fn=lambda e, s, r, _: (e.mask & s.mask).astype(jnp.int32), update_node_fn=lambda v, s, r, _: r
    )
    degree = update(g._replace(globals=None)).nodes  # any jraph code reads it
    np.testing.assert_array_equal(degree, np.asarray(g.edges.mask).reshape(2 * K, n).sum(axis=0))


def test_similarities_belong_to_their_relation_and_lie_in_the_unit_interval():
    g, _ = built()
    similarity, mask = table(g, g.edges.similarity), table(g, g.edges.mask)
    assert similarity.shape[-1] == len(EDGE_KINDS) == 7
    assert similarity.min() == 0 and similarity.max() <= 1
    assert not similarity[:K, :, 5:].any() and not similarity[K:, :, :5].any()
    assert not similarity[~mask].any()
    assert all(similarity[..., kind].any() for kind in range(7))
    norms = np.linalg.norm(np.asarray(g.nodes.feature)[: len(records())], axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)


def test_rewiring_keeps_degrees_similarities_and_relations():
    g, index = built()
    n = len(records())
    random = jax.jit(graph.rewire)(jax.random.key(3), g)
    senders, mask, env = table(random), table(g, g.edges.mask), np.asarray(g.nodes.env)
    jax.tree.map(np.testing.assert_array_equal, g._replace(senders=None), random._replace(senders=None))
    own = np.arange(senders.shape[1])
    same = env[senders] == env[own]
    assert same[:K][mask[:K]].all() and not same[K:][mask[K:]].any()
    assert (senders != own)[mask].all() and (senders == np.broadcast_to(own, senders.shape))[~mask].all()
    assert np.asarray(g.nodes.mask)[senders[mask]].all()
    for i in range(n):
        chosen = senders[:, i][mask[:, i]]
        assert len(set(chosen.tolist())) == len(chosen)
    crowded = env == index.env_ids.index("env-4")
    assert (senders != table(g))[:K, crowded & np.asarray(g.nodes.mask)].mean() > 0.9
    assert (table(graph.rewire(jax.random.key(4), g)) != senders)[K:, :n].mean() > 0.9

    big, named = graph.build(records()[::-1], k=K, num_patterns=8, feature_dim=32, capacity=500)
    assert by_name(graph.rewire(jax.random.key(3), big), named) == by_name(random, index)


# ---------------------------------------------------------------- patterns, recorded data


def test_patterns_join_tasks_of_equal_topology_across_environments():
    g, index = built()
    named = [records()[i] for i in index.record]
    rows = features.extract(named, 32, 0).execution
    pattern = np.asarray(g.nodes.pattern)[: len(named)]
    _, member = np.unique(rows, axis=0, return_inverse=True)
    for m in range(member.max() + 1):
        assert len(set(pattern[member == m].tolist())) == 1
    assert np.asarray(g.globals.pattern_mask).tolist() == [p in pattern for p in range(8)]
    assert len(set(pattern.tolist())) > 4


@pytest.mark.parametrize("name", ["bfcl_multiturn", "bfcl_v1_2024", "mcpmark", "swebench_verified", "taubench"])
def test_recorded_data_sets_build(name):
    path = DATA / name / "tasks.jsonl"
    if not path.is_file():
        pytest.skip("the recorded data sets are not next to this checkout")
    tasks = pool.read_jsonl(path)
    g, index = graph.build(tasks)
    mask = table(g, g.edges.mask, k=16)[:, : len(tasks)]
    sizes = {e: sum(t.env_id == e for t in tasks) for e in index.env_ids}
    for node, i in enumerate(index.record):
        size = sizes[tasks[i].env_id]
        assert mask[:16, node].sum() == min(16, size - 1)
        assert mask[16:, node].sum() == min(16, len(tasks) - size)
    assert int(g.globals.env_mask.sum()) == len(sizes)
    assert np.isfinite(np.asarray(g.edges.similarity)).all()
