"""Baselines that predict tasks from others through their features: VIP's Gaussian process, a Potts graph, GPS-lite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.graph import knn
from envsched_jax.schedulers import common, tally
from envsched_jax.select import sample
from envsched_jax.types import Batch, Belief, Graph, Key, Outcome, Scheduler, SchedulerState

SAMPLE = 512  # tasks whose pairwise distances give the median
INPUT_EXTRA = 2  # inputs of GPS-lite beside the features


class Process(NamedTuple):
    """What VIP remembers."""

    mean: jax.Array  # f32[N], logit of the pass rate
    width: jax.Array  # f32[], of the kernel


class Potts(NamedTuple):
    """What the Potts graph remembers. Neighbours are kept by uid, so that the numbering of nodes does not matter."""

    logit: jax.Array  # f32[N, Z], log-probability of each state up to a constant; zeros are a uniform row
    alpha: jax.Array  # f32[Z], of the pass rate in each state
    beta: jax.Array  # f32[Z]
    neighbour: jax.Array  # u32[N, M], uids
    linked: jax.Array  # bool[N, M], whether the slot holds a mutual neighbour


class Network(NamedTuple):
    """Weights of GPS-lite's predictor, one hidden layer of tanh."""

    hidden: jax.Array  # f32[D + 2, H]
    bias: jax.Array  # f32[H]
    out: jax.Array  # f32[H]
    offset: jax.Array  # f32[]


class Shared(NamedTuple):
    """What GPS-lite remembers."""

    network: Network
    direction: jax.Array  # f32[D], covariance of features and pass rates in the last batch
    level: jax.Array  # f32[], pass rate of the last batch less 1/2
    centre: jax.Array  # f32[D], mean feature of the last batch
    started: jax.Array  # f32[], 1 once there was a batch


def believe_gp(graph: Graph, state: SchedulerState, *, group_size: int, **_: Any) -> Belief:
    """Returns what VIP predicts, f32[N] per field; its recursion carries no uncertainty."""
    return _certain(jax.nn.sigmoid(state.memory.mean), state.history.n, group_size)


def vip_gp(
    *, batch_size: int, group_size: int, edge: float = 0.05, jitter: float = 1e-4, mean: float = 0.5
) -> Scheduler:
    """Returns the predictor of VIP (arXiv 2602.01601) as a scheduler: the tasks of the largest p(1-p) are picked.

    The logit of the pass rate is a Gaussian process over ``graph.nodes.feature`` with the kernel
    ``exp(-|x - y|^2 / (2 w^2))``, w the median distance of pairs. A batch S with pass rates r gives
    ``g = logit(clip(r, edge, 1 - edge))``, ``m_rest += K_rest,S (K_SS + jitter I)^-1 (g - m_S)`` and ``m_S = g``: no
    noise, no forgetting, and of the past only the mean is kept, so memory is one number per task.

    The paper uses the prediction to share rollouts out among the tasks of a batch; with groups of one size the tasks
    of the largest predicted gradient variance ``p(1-p)`` are taken, ties at random. The median is over the pairs among
    the 512 tasks of the smallest uid when the state is made. Rows of one task are pooled; a task without features
    neither lends nor borrows.

    Raises:
      ValueError: for sizes below 1, an edge outside (0, 1/2), a jitter that is not positive or a mean outside (0, 1).
    """
    common.check_sizes(batch_size, group_size)
    if not (0.0 < edge < 0.5 and 0.0 < mean < 1.0 and jitter > 0.0):
        raise ValueError(f"edge lies in (0, 1/2), mean in (0, 1), jitter above 0, got {edge}, {mean} and {jitter}")

    def init(graph: Graph) -> SchedulerState:
        prior = jnp.full(graph.nodes.mask.shape, jnp.log(mean / (1.0 - mean)), jnp.float32)
        return common.init(graph, Process(prior, _median_distance(graph)))

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        belief = believe_gp(graph, state, group_size=group_size)
        node, mask = tally.largest(key, graph, belief.variance, graph.nodes.mask, batch_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), belief.variance, belief)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        memory, feature = state.memory, graph.nodes.feature
        num_nodes = feature.shape[0]
        node, rate, used = tally.rates(outcome, num_nodes)
        clipped = jnp.clip(rate, edge, 1.0 - edge)
        seen = jnp.log(clipped) - jnp.log1p(-clipped)
        lends = used & _has_feature(graph)[node]
        kernel = jnp.where(lends[None, :], _kernel(feature, feature[node], memory.width), 0.0)
        own = jnp.where(lends[:, None], kernel[node], 0.0) + jnp.diag(jnp.where(lends, jitter, 1.0))
        weight = jax.scipy.linalg.solve(own, jnp.where(lends, seen - memory.mean[node], 0.0), assume_a="pos")
        shift = jnp.matmul(kernel, weight, precision="highest")
        moved = memory.mean + jnp.where(_has_feature(graph), shift, 0.0)
        moved = moved.at[jnp.where(used, node, num_nodes)].set(seen, mode="drop")
        return common.observe(graph, state, outcome, gamma=1.0)._replace(memory=memory._replace(mean=moved))

    return Scheduler(init, select, observe)


def believe_potts(graph: Graph, state: SchedulerState, *, group_size: int, **_: Any) -> Belief:
    """Returns what the Potts graph believes, f32[N] per field: expectations over states and their Beta pass rates."""
    memory = state.memory
    total = memory.alpha + memory.beta
    mean = memory.alpha / total
    draws = jnp.arange(group_size, dtype=jnp.float32)[:, None]
    same = sum(((x[None, :] + draws) / (total[None, :] + draws)).prod(axis=0) for x in (memory.alpha, memory.beta))
    per_state = jnp.stack([mean, mean * memory.beta / (total + 1.0), 1.0 - same], axis=1)
    moments = jnp.matmul(jax.nn.softmax(memory.logit, axis=1), per_state, precision="highest")
    return Belief(moments[:, 0], moments[:, 1], moments[:, 2], state.history.n)


def potts_graph(
    *,
    batch_size: int,
    group_size: int,
    states: int = 5,
    neighbours: int = 10,
    coupling: float = 1.0,
    discount: float = 0.9,
    strength: float = 2.0,
    sweeps: int = 5,
) -> Scheduler:
    """Returns graph-structured online difficulty estimation (arXiv 2608.17941) as a scheduler.

    Every task is in one of ``states`` difficulty states z with a pass rate ``theta_z ~ Beta(a_z, b_z)``; mutual
    nearest neighbours by ``graph.nodes.feature`` tend to share a state (Potts model). With the task's discounted
    records, s passes of n, a sweep of mean field is::

      log q_i(z) = coupling * sum_j q_j(z) + s_i E log theta_z + (n_i - s_i) E log(1 - theta_z) + const
      a_z = a0_z + sum_i q_i(z) s_i,   b_z = b0_z + sum_i q_i(z) (n_i - s_i)

    The tasks with the largest ``p(1-p)`` of the mean ``p_i = sum_z q_i(z) a_z / (a_z + b_z)`` are picked, ties at
    random: the paper hands p to other methods. It does not give us the defaults of its settings, so these are ours.
    Its states start from spectral clustering; here the prior tells them apart, with means ``(z + 1/2) / states`` and
    the same ``strength``, and every task starts even. Records are discounted per step, ``sweeps`` sweeps start from the
    last ones. Neighbours are found once, when the state is made: a task that joins later in the same bucket has none.

    Raises:
      ValueError: for sizes, states, neighbours or sweeps below 1, a coupling below 0, a strength that is not positive
        or a discount outside [0, 1].
    """
    common.check_sizes(batch_size, group_size)
    if min(states, neighbours, sweeps) < 1 or coupling < 0.0 or strength <= 0.0 or not 0.0 <= discount <= 1.0:
        given = (states, neighbours, sweeps, coupling, strength, discount)
        raise ValueError(f"states, neighbours, sweeps, coupling, strength or discount out of range: {given}")
    level = (jnp.arange(states, dtype=jnp.float32) + 0.5) / states
    prior = strength * level, strength * (1.0 - level)

    def init(graph: Graph) -> SchedulerState:
        logit = jnp.zeros((graph.nodes.mask.shape[0], states), jnp.float32)
        alpha, beta = (jnp.array(x) for x in prior)  # copies, so that a state can be donated
        return common.init(graph, Potts(logit, alpha, beta, *_mutual_neighbours(graph, neighbours)))

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        belief = believe_potts(graph, state, group_size=group_size)
        value = belief.mean * (1.0 - belief.mean)
        node, mask = tally.largest(key, graph, value, graph.nodes.mask, batch_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), value, belief)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        after = common.observe(graph, state, outcome, gamma=discount)
        n = after.history.n
        passes = jnp.clip(after.history.s1, 0.0, n)
        sender, found = _by_uid(graph, state.memory)

        def sweep(_: int, memory: Potts) -> Potts:
            memory = _count(memory, prior, passes, n - passes)
            return memory._replace(logit=_relabel(memory, sender, found, passes, n - passes, coupling))

        memory = _count(jax.lax.fori_loop(0, sweeps, sweep, state.memory), prior, passes, n - passes)
        _, rollouts, _ = tally.per_row(outcome)
        memory = jax.tree.map(lambda new, old: jnp.where((rollouts > 0.0).any(), new, old), memory, state.memory)
        return after._replace(memory=memory)

    return Scheduler(init, select, observe)


def believe_gps(graph: Graph, state: SchedulerState, *, group_size: int, **_: Any) -> Belief:
    """Returns what the network predicts, f32[N] per field."""
    logit = _forward(state.memory.network, _inputs(graph.nodes.feature, state.memory))
    return _certain(jax.nn.sigmoid(logit), state.history.n, group_size)


def gps_lite(
    *,
    batch_size: int,
    group_size: int,
    hidden: int = 32,
    learning_rate: float = 0.3,
    updates: int = 10,
    diversity: float = 0.1,
) -> Scheduler:
    """Returns a light form of GPS (arXiv 2602.01970): one small predictor for all tasks, and batches that differ.

    GPS encodes the last batch by a Transformer into a latent variable and has about 20 million parameters; this is
    *not* that model, and its settings are ours. Here one hidden layer reads a task's features x and two numbers that
    the last batch gives: ``<x, c>``, c the covariance of features and pass rates, and the batch's pass rate less 1/2.
    What is kept is the idea: success is predicted by one function of task and last batch, trained online. Each batch is
    predicted from the one before; ``updates`` steps of gradient descent on its binomial log-loss per rollout follow.
    The first weights are fixed random numbers, the same for every seed, and predict 1/2.

    The batch is built pick by pick from the whole pool as in GPS, by the largest ``-(p - 1/2)^2 + diversity (d_in +
    d_last)``: the mean cosine distance to the picks so far and to the last batch. ``value`` is the first term.

    Raises:
      ValueError: for sizes, hidden or updates below 1, or a learning rate or diversity below 0.
    """
    common.check_sizes(batch_size, group_size)
    if min(hidden, updates) < 1 or min(learning_rate, diversity) < 0.0:
        given = (hidden, updates, learning_rate, diversity)
        raise ValueError(f"hidden, updates, learning_rate or diversity out of range: {given}")

    def init(graph: Graph) -> SchedulerState:
        dim = graph.nodes.feature.shape[1]
        weights = jax.random.normal(jax.random.key(0), (dim + INPUT_EXTRA, hidden), jnp.float32)
        network = Network(
            hidden=weights,
            bias=jnp.zeros(hidden, jnp.float32),
            out=jnp.zeros(hidden, jnp.float32),
            offset=jnp.zeros((), jnp.float32),
        )
        memory = Shared(
            network=network,
            direction=jnp.zeros(dim, jnp.float32),
            level=jnp.zeros((), jnp.float32),
            centre=jnp.zeros(dim, jnp.float32),
            started=jnp.zeros((), jnp.float32),
        )
        return common.init(graph, memory)

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        memory, feature = state.memory, graph.nodes.feature
        belief = believe_gps(graph, state, group_size=group_size)
        value = -jnp.square(belief.mean - 0.5)
        last = memory.started * (1.0 - jnp.matmul(feature, memory.centre, precision="highest"))
        score = value + diversity * last + tally.TIE * sample.uniform(key, graph.nodes.uid)
        node, mask = _spread(score, feature, graph.nodes.mask, diversity, batch_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), value, belief)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        memory = state.memory
        node, n, passes = tally.per_row(outcome)
        feature = graph.nodes.feature[node]
        inputs = _inputs(feature, memory)

        def descend(_: int, network: Network) -> Network:
            gradient = jax.grad(_loss)(network, inputs, passes, n)
            return jax.tree.map(lambda x, g: x - learning_rate * g, network, gradient)

        network = jax.lax.fori_loop(0, updates, descend, memory.network)
        memory = jax.tree.map(
            lambda new, old: jnp.where((n > 0.0).any(), new, old), _summary(network, feature, n, passes), memory
        )
        return common.observe(graph, state, outcome, gamma=1.0)._replace(memory=memory)

    return Scheduler(init, select, observe)


def _certain(rate: jax.Array, evidence: jax.Array, group_size: int) -> Belief:
    """Returns the belief that every task's pass rate is exactly ``rate``, f32[N]."""
    informative = 1.0 - rate**group_size - (1.0 - rate) ** group_size
    return Belief(rate, rate * (1.0 - rate), jnp.maximum(informative, 0.0), evidence)


def _has_feature(graph: Graph) -> jax.Array:
    return (graph.nodes.feature != 0.0).any(axis=1)


def _squared_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the squared distances between the rows of x and of y, f32[len(x), len(y)]."""
    product = jnp.matmul(x, y.T, precision="highest")
    square = jnp.square(x).sum(axis=1)[:, None] + jnp.square(y).sum(axis=1)[None, :] - 2.0 * product
    return jnp.maximum(square, 0.0)


def _kernel(x: jax.Array, y: jax.Array, width: jax.Array) -> jax.Array:
    return jnp.exp(-_squared_distance(x, y) / (2.0 * jnp.square(width)))


def _median_distance(graph: Graph) -> jax.Array:
    """Returns the median distance of the pairs among ``SAMPLE`` tasks with features; 1 where that is 0 or missing."""
    nodes, has = graph.nodes, _has_feature(graph)
    _, order = jax.lax.sort((~has, nodes.uid, jnp.arange(has.shape[0])), num_keys=2)[1:]
    order = order[:SAMPLE]
    distance = jnp.sqrt(_squared_distance(nodes.feature[order], nodes.feature[order]))
    pair = has[order][:, None] & has[order][None, :] & jnp.triu(jnp.ones(distance.shape, bool), 1)
    ascending = jnp.sort(jnp.where(pair, distance, jnp.inf).ravel())
    count = pair.sum()
    median = (ascending[jnp.maximum(count - 1, 0) // 2] + ascending[count // 2]) / 2.0
    return jnp.where((count > 0) & (median > 0.0) & jnp.isfinite(median), median, 1.0)


def _mutual_neighbours(graph: Graph, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the uids of the ``count`` nearest tasks by cosine, u32[N, count], and which are so in both directions."""
    nodes, has = graph.nodes, _has_feature(graph)
    num_nodes = has.shape[0]
    extra = -num_nodes % knn.BLOCK
    mask, env, uid = (jnp.pad(x, (0, extra)) for x in (has, nodes.env, nodes.uid))
    feature = jnp.pad(nodes.feature, ((0, extra), (0, 0))).T
    nothing = jnp.zeros((0, num_nodes + extra), jnp.float32)
    points = knn.Points(
        mask=mask, env=env, uid=uid, group=env, semantics=feature, tools=nothing, other=nothing, shape=nothing
    )
    start = jnp.zeros((num_nodes + extra) // knn.BLOCK, jnp.int32)
    sender, valid = knn.nearest(_cosine, points, start, jnp.uint32(0), k=count, width=num_nodes + extra)
    sender, valid = sender[:num_nodes], valid[:num_nodes]
    receiver = jnp.arange(num_nodes, dtype=jnp.int32)
    back = ((sender[sender] == receiver[:, None, None]) & valid[sender]).any(axis=2)
    linked = valid & back
    return jnp.where(linked, nodes.uid[sender], jnp.uint32(0)), linked


def _cosine(rows: knn.Points, cols: knn.Points) -> jax.Array:
    product = jnp.einsum("dr,dc->rc", rows.semantics, cols.semantics, precision=jax.lax.Precision.HIGHEST)
    return jnp.maximum(1.0 + product, 0.0)


def _by_uid(graph: Graph, memory: Potts) -> tuple[jax.Array, jax.Array]:
    """Returns the neighbours as nodes of this graph, i32[N, M], and which exist, bool[N, M]."""
    uid = graph.nodes.uid
    ordered, order = jax.lax.sort((uid, jnp.arange(uid.shape[0], dtype=jnp.int32)), num_keys=1)
    place = jnp.minimum(jnp.searchsorted(ordered, memory.neighbour), uid.shape[0] - 1)
    sender = order[place]
    return sender, memory.linked & (uid[sender] == memory.neighbour)


def _count(memory: Potts, prior: tuple[jax.Array, jax.Array], passes: jax.Array, failures: jax.Array) -> Potts:
    """Returns the memory with the Betas of all states counted anew."""
    share = jax.nn.softmax(memory.logit, axis=1)
    total = jnp.matmul(jnp.stack([passes, failures]), share, precision="highest")
    return memory._replace(alpha=prior[0] + total[0], beta=prior[1] + total[1])


def _relabel(
    memory: Potts, sender: jax.Array, found: jax.Array, passes: jax.Array, failures: jax.Array, coupling: float
) -> jax.Array:
    """Returns the new log-probabilities of the states, f32[N, Z], normalised."""
    share = jax.nn.softmax(memory.logit, axis=1)
    around = jnp.where(found[:, :, None], share[sender], 0.0).sum(axis=1)
    both = jax.scipy.special.digamma(memory.alpha + memory.beta)
    up, down = (jax.scipy.special.digamma(x) - both for x in (memory.alpha, memory.beta))
    own = passes[:, None] * up[None, :] + failures[:, None] * down[None, :]
    return jax.nn.log_softmax(coupling * around + own, axis=1)


def _inputs(feature: jax.Array, memory: Shared) -> jax.Array:
    """Returns what the network reads, f32[M, D + 2]."""
    along = jnp.matmul(feature, memory.direction, precision="highest")
    return jnp.concatenate([feature, along[:, None], jnp.full_like(along, memory.level)[:, None]], axis=1)


def _forward(network: Network, inputs: jax.Array) -> jax.Array:
    """Returns the logit of the pass rate, f32[M]."""
    hidden = jnp.tanh(jnp.matmul(inputs, network.hidden, precision="highest") + network.bias[None, :])
    return jnp.matmul(hidden, network.out, precision="highest") + network.offset


def _loss(network: Network, inputs: jax.Array, passes: jax.Array, n: jax.Array) -> jax.Array:
    """Returns the binomial log-loss per rollout, a scalar."""
    logit = _forward(network, inputs)
    total = (n * jax.nn.softplus(logit) - passes * logit).sum()
    return total / jnp.maximum(n.sum(), 1.0)


def _summary(network: Network, feature: jax.Array, n: jax.Array, passes: jax.Array) -> Shared:
    """Returns the memory after a batch; rows with a valid rollout count once each."""
    used = (n > 0.0).astype(jnp.float32)
    count = jnp.maximum(used.sum(), 1.0)
    rate = passes / jnp.maximum(n, 1.0)
    level = (used * rate).sum() / count
    direction = jnp.matmul(used * (rate - level), feature, precision="highest") / count
    centre = jnp.matmul(used, feature, precision="highest") / count
    return Shared(network, direction, level - 0.5, centre, jnp.ones((), jnp.float32))


def _spread(
    score: jax.Array, feature: jax.Array, eligible: jax.Array, diversity: float, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns picks one by one by score plus mean cosine distance to the picks so far: i32[count] and bool[count]."""

    def step(
        state: tuple[jax.Array, jax.Array], picked: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        left, cosine = state
        away = jnp.where(picked > 0.0, 1.0 - cosine / jnp.maximum(picked, 1.0), 0.0)
        best = jnp.argmax(jnp.where(left, score + diversity * away, -jnp.inf)).astype(jnp.int32)
        found = left.any()
        cosine = cosine + jnp.matmul(feature, feature[best], precision="highest")
        return (left.at[best].set(False), cosine), (jnp.where(found, best, 0), found)

    start = eligible, jnp.zeros_like(score)
    _, (node, mask) = jax.lax.scan(step, start, jnp.arange(count, dtype=jnp.float32))
    return node, mask
