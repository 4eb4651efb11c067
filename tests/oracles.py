"""The rules of belief, quotas and selection once more: float64, NumPy, plain loops, nothing shared with the library."""

import math

import numpy as np

VALID = (1, 2, 3)


def history(n, outcomes, gamma):
    """Replays a list of outcomes; returns a dict of float64 arrays."""
    names = ("n", "s1", "ssw", "dof", "informative", "groups", "tokens", "seconds", "visits", "last_step")
    out = {name: np.zeros(n) for name in names}
    out["last_step"] -= 1
    for step, outcome in enumerate(outcomes):
        for name in names[:8]:
            out[name] *= gamma
        for b in range(len(outcome.node)):
            status = np.asarray(outcome.status[b])
            if (status == 0).all():
                continue
            i = int(outcome.node[b])
            worth = gamma ** int(outcome.age[b])
            rewards = [float(r) for r, s in zip(outcome.reward[b], status, strict=True) if s in VALID]
            mean = sum(rewards) / len(rewards) if rewards else 0.0
            out["n"][i] += worth * len(rewards)
            out["s1"][i] += worth * sum(rewards)
            out["ssw"][i] += worth * sum((r - mean) ** 2 for r in rewards)
            if len(rewards) >= 2:
                out["dof"][i] += worth * (len(rewards) - 1)
                out["groups"][i] += worth
                out["informative"][i] += worth * (max(rewards) - min(rewards) > 1e-6)
            for name in ("tokens", "seconds"):
                values = getattr(outcome, name)[b]
                out[name][i] += worth * sum(float(x) for x, s in zip(values, status, strict=True) if s in VALID)
            out["visits"][i] += 1
            out["last_step"][i] = step
    return out


def dense_weights(graph, kind_weights, mix):
    """Returns A, [N, N], row i the weights with which i hears the others."""
    n = len(graph.nodes.mask)
    slots = len(graph.senders) // n
    raw = np.zeros((2, n, n))
    for slot in range(slots):
        for i in range(n):
            edge = slot * n + i
            if graph.edges.mask[edge]:
                weight = sum(
                    max(float(w), 0.0) * float(s)
                    for w, s in zip(kind_weights, graph.edges.similarity[edge], strict=True)
                )
                raw[int(slot >= slots // 2), i, int(graph.senders[edge])] += weight
    matrix = np.zeros((n, n))
    for i in range(n):
        sums = [raw[r, i].sum() for r in range(2)]
        shares = [mix if sums[0] > 0 else 0.0, 1.0 - mix if sums[1] > 0 else 0.0]
        for r in range(2):
            if sums[r] > 0 and sum(shares) > 0:
                matrix[i] += shares[r] / sum(shares) * raw[r, i] / sums[r]
    return matrix


def diffusion_matrix(matrix, restart, rounds):
    """Returns T with X_rounds = T S."""
    eye = np.eye(len(matrix))
    total = eye.copy()
    for _ in range(rounds):
        total = (1.0 - restart) * matrix @ total + restart * eye
    return total


def length_bound(matrix, restart, rounds):
    """Returns the bound on the squared length of every row of T without its diagonal source term."""
    n = len(matrix)
    first = [math.sqrt(sum(matrix[i, j] ** 2 for j in range(n))) for i in range(n)]
    length = [(1.0 - restart) * x for x in first]
    for _ in range(rounds - 1):
        further = [math.sqrt(sum(matrix[i, k] * length[k] ** 2 for k in range(n))) for i in range(n)]
        length = [(1.0 - restart) * (restart * first[i] + further[i]) for i in range(n)]
    return np.square(length)


def believe(graph, stats, *, nu, c, prior, kind_weights, restart, mix, rounds, group_size):
    """Returns (mean, variance, share of informative groups, evidence) of every node, float64."""
    n = len(graph.nodes.mask)
    matrix = dense_weights(graph, kind_weights, mix)
    full = diffusion_matrix(matrix, restart, rounds)
    bound = length_bound(matrix, restart, rounds)
    env = np.asarray(graph.nodes.env)
    kinds = (("s1", "n", 1.0), ("ssw", "dof", 1.0), ("informative", "groups", 1.0 / group_size))
    results, evidence = [], np.zeros(n)
    for (top, bottom, unit), constant in zip(kinds, prior, strict=True):
        sums, counts, c_kind = stats[top], stats[bottom], c * unit
        pool = (sums.sum() + c_kind * constant) / (counts.sum() + c_kind)
        out = np.zeros(n)
        for i in range(n):
            mine = env == env[i]
            env_value = (sums[mine].sum() + c_kind * pool) / (counts[mine].sum() + c_kind)
            others = [j for j in range(n) if j != i]
            seen = sum(full[i, j] * counts[j] for j in others)
            numerator, denominator = sums[i] + c_kind * env_value, counts[i] + c_kind
            used = 0.0
            if seen > 1e-9:
                reach = sum(full[i, j] for j in others)
                used = min(nu * unit, seen * reach / bound[i])
                numerator += used * sum(full[i, j] * sums[j] for j in others) / seen
                denominator += used
            out[i] = numerator / denominator
            if top == "s1":
                evidence[i] = counts[i] + used
        results.append(out)
    return *results, evidence


def shares(graph, mode, weights=None):
    """Returns the share of every environment, float64."""
    env_capacity = len(graph.globals.env_mask)
    tasks = [0] * env_capacity
    for i, e in enumerate(graph.nodes.env):
        tasks[int(e)] += bool(graph.nodes.mask[i])
    wanted = []
    for e in range(env_capacity):
        by_mode = {"uniform": 1.0, "proportional": tasks[e], "weights": weights[e] if weights else 0.0}[mode]
        wanted.append(by_mode if tasks[e] else 0.0)
    return np.array(wanted) / max(sum(wanted), 1e-300), tasks


def allocate(graph, carry, batch_size, mode, weights=None):
    """Slot by slot to the environment that is owed most."""
    share, tasks = shares(graph, mode, weights)
    quota = [0] * len(share)
    for _ in range(batch_size):
        owed = {
            e: share[e] * batch_size + float(carry[e]) - quota[e]
            for e in range(len(share))
            if share[e] > 0 and quota[e] < tasks[e]
        }
        if owed:
            quota[max(owed, key=lambda e: (owed[e], -e))] += 1
    return quota


def draw(score, eligible, env, quota, count):
    """A walk down the scores under the quotas, then another without them."""
    order = sorted((i for i in range(len(score)) if eligible[i]), key=lambda i: -float(score[i]))
    left, picked = list(quota), []
    for i in order:
        if len(picked) < count and left[int(env[i])] > 0:
            left[int(env[i])] -= 1
            picked.append(i)
    for i in order:
        if len(picked) < count and i not in picked:
            picked.append(i)
    return picked


def greedy(value, feature, eligible, env, quota, closest, count, eta):
    """One pick after the other, similarity to everything picked so far computed anew."""
    value, feature = np.asarray(value, np.float64), np.asarray(feature, np.float64)
    left, picked = list(quota), []
    for _ in range(count):
        open_nodes = [i for i in range(len(value)) if eligible[i] and i not in picked]
        allowed = [i for i in open_nodes if left[int(env[i])] > 0] or open_nodes
        if not allowed:
            break
        gains = {}
        for i in allowed:
            near = max([float(closest[i])] + [max(0.0, float(feature[i] @ feature[j])) for j in picked])
            gains[i] = value[i] - eta * near
        best = max(gains, key=gains.get)
        left[int(env[best])] -= 1
        picked.append(best)
    return picked


def p_informative(mean, variance, group_size):
    """The beta-binomial formula through log-gamma."""

    def log_beta(a, b):
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    share = min(max(variance / (mean * (1.0 - mean)), 1e-3), 1.0 - 1e-3)
    total = share / (1.0 - share)
    a, b = mean * total, (1.0 - mean) * total
    return (
        1.0
        - math.exp(log_beta(a + group_size, b) - log_beta(a, b))
        - math.exp(log_beta(a, b + group_size) - log_beta(a, b))
    )
