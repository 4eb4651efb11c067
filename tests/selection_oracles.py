"""Information, cost and partial credit once more: float64, NumPy, plain loops, nothing shared with the library."""

import math

import numpy as np
import oracles


def covariance(sd, feature, env, shared, noise):
    """Returns Sigma / R, [N, N]."""
    sd, feature = np.asarray(sd, np.float64), np.asarray(feature, np.float64)
    n = len(sd)
    noise = np.broadcast_to(np.asarray(noise, np.float64), (n,))
    out = np.zeros((n, n))
    for i, j in np.ndindex(n, n):
        rho = (1.0 - shared) * float(feature[i] @ feature[j]) ** 2 + shared * (env[i] == env[j])
        out[i, j] = (sd[i] / math.sqrt(noise[i])) * (sd[j] / math.sqrt(noise[j])) * (1.0 if i == j else rho)
    return out


def information(matrix, batch):
    """Returns 1/2 log det(I + Sigma_SS / R)."""
    part = matrix[np.ix_(batch, batch)]
    sign, logdet = np.linalg.slogdet(np.eye(len(batch)) + part)
    assert sign > 0
    return 0.5 * logdet


def logdet_greedy(value, matrix, eligible, env, quota, chosen, *, count, weight, cost=None, budget=math.inf):
    """One pick after the other, the determinant of every possible batch computed anew."""
    value = np.asarray(value, np.float64)
    cost = np.zeros(len(value)) if cost is None else np.asarray(cost, np.float64)
    left, picked, spent = list(quota), [], 0.0
    for _ in range(count):
        fits = [i for i in range(len(value)) if eligible[i] and i not in picked and spent + cost[i] <= budget]
        allowed = [i for i in fits if left[int(env[i])] > 0] or fits
        if not allowed:
            break
        batch = [*chosen, *picked]
        base = information(matrix, batch)
        best = max(allowed, key=lambda i: value[i] + weight * (information(matrix, [*batch, i]) - base))
        left[int(env[best])] -= 1
        spent += cost[best]
        picked.append(best)
    return picked


def costs(graph, stats_of, name, *, nu, c, kind_weights, restart, mix, rounds):
    """Returns the predicted cost of every node, float64."""
    n = len(graph.nodes.mask)
    matrix = oracles.dense_weights(graph, kind_weights, mix)
    full = oracles.diffusion_matrix(matrix, restart, rounds)
    bound = oracles.length_bound(matrix, restart, rounds)
    env, sums, counts = np.asarray(graph.nodes.env), stats_of[name], stats_of["n"]
    pool = sums.sum() / counts.sum() if counts.sum() > 0 else 1.0
    out = np.zeros(n)
    for i in range(n):
        mine = env == env[i]
        env_value = (sums[mine].sum() + c * pool) / (counts[mine].sum() + c)
        top, bottom = sums[i] + c * env_value, counts[i] + c
        others = [j for j in range(n) if j != i]
        seen = sum(full[i, j] * counts[j] for j in others)
        if seen > 1e-9:
            used = min(nu, seen * sum(full[i, j] for j in others) / bound[i])
            top += used * sum(full[i, j] * sums[j] for j in others) / seen
            bottom += used
        out[i] = top / bottom
    return out


def pmf(mean, checks, rho):
    """Returns the chance of 0..checks passed, float64; beta-binomial through log-gamma, with both limits."""
    if rho == 0.0:
        return np.array([math.comb(checks, v) * mean**v * (1.0 - mean) ** (checks - v) for v in range(checks + 1)])
    if rho == 1.0:
        return np.array([1.0 - mean, *[0.0] * (checks - 1), mean])
    a, b = mean * (1.0 / rho - 1.0), (1.0 - mean) * (1.0 / rho - 1.0)

    def log_beta(x, y):
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return np.array(
        [math.comb(checks, v) * math.exp(log_beta(a + v, b + checks - v) - log_beta(a, b)) for v in range(checks + 1)]
    )


def p_informative_given(mean, checks, rho, group_size):
    """The chance that not all of a group pass the same number of checks."""
    return 1.0 - sum(p**group_size for p in pmf(mean, checks, rho))


def p_informative_checks(mean, believed, checks, rho, group_size):
    """The same averaged over the Beta with this mean and E[m (1-m)] = believed, on a wide and fine grid of logits."""
    total = believed / (mean * (1.0 - mean) - believed)
    a, b = mean * total, (1.0 - mean) * total
    result, step = 0.0, 0.05
    for x in np.arange(-25.0, 25.0, step):
        p, q = 1.0 / (1.0 + math.exp(-x)), 1.0 / (1.0 + math.exp(x))
        density = math.exp(a * math.log(p) + b * math.log(q) + math.lgamma(total) - math.lgamma(a) - math.lgamma(b))
        result += step * density * p_informative_given(p, checks, rho, group_size)
    return result


def correlation(env, checks, record, c, prior, num_envs):
    """The ratio estimate of the correlation of checks, task by task."""
    top, bottom = np.zeros(num_envs), np.zeros(num_envs)
    for i in range(len(env)):
        if record["dof"][i] <= 0 or checks[i] <= 1:
            continue
        mean = record["s1"][i] / record["n"][i]
        q = mean * (1.0 - mean) + record["ssw"][i] / record["dof"][i] / record["n"][i]
        top[env[i]] += record["ssw"][i] - record["dof"][i] * q / checks[i]
        bottom[env[i]] += record["dof"][i] * q * (checks[i] - 1) / checks[i]
    pool = (top.sum() + 0.25 * c * prior) / (bottom.sum() + 0.25 * c)
    return np.clip((top + 0.25 * c * pool) / (bottom + 0.25 * c), 0.0, 1.0)
