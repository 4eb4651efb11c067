"""The baselines once more, from their formulas: float64, NumPy, plain loops, nothing shared with the library.

Random numbers are arguments: a method is checked given the numbers that it drew.
"""

import math

import numpy as np
from scipy.special import digamma

VALID = (1, 2, 3)
TIE = 1e-4


def rows(outcome):
    """Returns (node, valid rewards) of the rows that are not absent."""
    out = []
    for b, status in enumerate(np.asarray(outcome.status)):
        if (status != 0).any():
            rewards = [float(r) for r, s in zip(np.asarray(outcome.reward)[b], status, strict=True) if s in VALID]
            out.append((int(outcome.node[b]), rewards))
    return out


def per_node(outcome):
    """Returns {node: [valid rollouts, passes]} of the tasks with valid rollouts."""
    out = {}
    for node, rewards in rows(outcome):
        if rewards:
            n, s = out.get(node, (0, 0.0))
            out[node] = (n + len(rewards), s + sum(min(max(r, 0.0), 1.0) for r in rewards))
    return out


def sizes(rewards):
    """Returns |A| of a group."""
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [abs(r - mean) / (deviation + 1e-4) for r in rewards]


def top(score, eligible, count):
    return sorted((i for i in range(len(score)) if eligible[i]), key=lambda i: -score[i])[:count]


def mixed(alpha, beta, group_size):
    """E[1 - p^G - (1-p)^G] through log-gamma."""

    def log_beta(a, b):
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    base = log_beta(alpha, beta)
    return 1 - math.exp(log_beta(alpha + group_size, beta) - base) - math.exp(log_beta(alpha, beta + group_size) - base)


class Posterior:
    def __init__(self, n, prior, discount):
        self.prior, self.discount = prior, discount
        self.alpha, self.beta = np.full(n, float(prior[0])), np.full(n, float(prior[1]))

    def observe(self, outcome):
        keep = self.discount
        for i, (n, s) in per_node(outcome).items():
            self.alpha[i] = keep * self.alpha[i] + (1 - keep) * self.prior[0] + s
            self.beta[i] = keep * self.beta[i] + (1 - keep) * self.prior[1] + n - s

    def belief(self, group_size):
        a, b = self.alpha, self.beta
        informative = [mixed(x, y, group_size) for x, y in zip(a, b, strict=True)]
        return a / (a + b), a * b / ((a + b) * (a + b + 1)), np.array(informative)

    def thompson(self, lottery, draw, eligible, candidates, count):
        """``lottery`` picks the candidates, ``draw(i, alpha, beta)`` is the random pass rate of one."""
        pool = top(lottery, eligible, candidates)
        distance = {i: (draw(i, self.alpha[i], self.beta[i]) - 0.5) ** 2 for i in pool}
        return sorted(pool, key=distance.get)[:count]


class Sec:
    def __init__(self, env, num_envs, rate):
        self.env, self.rate, self.value = env, rate, np.zeros(num_envs)

    def observe(self, outcome):
        seen, found = {}, set()
        for node, rewards in rows(outcome):
            found.add(self.env[node])
            seen.setdefault(self.env[node], []).extend(sizes(rewards))
        if not any(seen.values()):
            return
        for e in range(len(self.value)):
            if e in found and not seen[e]:
                continue
            target = np.mean(seen[e]) if e in found else 0.0
            self.value[e] += self.rate * (target - self.value[e])


class Dump:
    def __init__(self, env, num_envs, window):
        self.env, self.window = env, window
        self.last, self.pulls = [[] for _ in range(num_envs)], np.zeros(num_envs)

    def observe(self, outcome):
        for node, rewards in rows(outcome):
            e = self.env[node]
            self.last[e] = (self.last[e] + sizes(rewards))[-self.window :]
            self.pulls[e] += len(rewards)

    @property
    def value(self):
        mean = np.array([np.mean(x) if x else 0.0 for x in self.last])
        return mean + np.sqrt(2 * np.log(self.pulls.sum() + 1) / (self.pulls + 1))


def draw_arms(value, temperature, gumbels, lottery, eligible, env):
    """Seat by seat an arm by softmax (Gumbel numbers [B, E]), then tasks in the order of the lottery."""
    left = [
        top(lottery, [ok and e == arm for ok, e in zip(eligible, env, strict=True)], 10**9) for arm in range(len(value))
    ]
    picked = []
    for noise in gumbels:
        open_arms = [e for e in range(len(value)) if left[e]]
        if open_arms:
            arm = max(open_arms, key=lambda e: value[e] / temperature + noise[e])
            picked.append(left[arm].pop(0))
    return picked


class Scaler:
    def __init__(self, env, num_envs, eligible, levels, window, patience, active, gain=2.0, target=0.5):
        self.env, self.eligible, self.levels, self.window = env, eligible, levels, window
        self.patience, self.size, self.gain, self.target = patience, active, gain, target
        self.n, self.s, self.visits = np.zeros(len(env)), np.zeros(len(env)), np.zeros(len(env))
        self.d = np.zeros(num_envs)
        self.active, self.resting, self.replaced = set(), set(), 0
        self.trail = [[] for _ in range(num_envs)]
        self.accuracy = [[] for _ in range(num_envs)]

    def observe(self, outcome):
        table, rewards_of = rows(outcome), {}
        if not table:
            return
        for node, rewards in table:
            rewards_of.setdefault(self.env[node], []).extend(rewards)
            self.visits[node] += 1
            self.n[node] += len(rewards)
            self.s[node] += sum(rewards)
        self.active |= set(rewards_of)
        self.resting = set()
        for e, rewards in rewards_of.items():
            if rewards:
                self._visit(e, np.mean(rewards))

    def _visit(self, e, accuracy):
        self.trail[e].append(self.d[e])
        self.accuracy[e].append(accuracy)
        self.d[e] = min(max(self.d[e] + min(max(self.gain * (accuracy - self.target), -1), 1), 0), self.levels)
        last = self.trail[e][-self.window :]
        flat = len(last) == self.window and self.window > 1 and np.polyfit(range(len(last)), last, 1)[0] <= 1e-6
        ends = self.accuracy[e][-self.patience :], self.trail[e][-self.patience :]
        failing = len(ends[0]) == self.patience and max(ends[0]) == 0
        at_top = len(ends[1]) == self.patience and min(ends[1]) >= self.levels
        if flat or failing or at_top:
            self.active.discard(e)
            self.resting.add(e)
            self.trail[e], self.accuracy[e] = [], []
            self.replaced += 1

    def select(self, luck, lottery, count):
        tasks = {
            e: [i for i in range(len(self.env)) if self.eligible[i] and self.env[i] == e] for e in range(len(self.d))
        }
        rank = {e: (0 if e in self.active else 2 if e in self.resting else 1, -luck[e]) for e in tasks if tasks[e]}
        chosen = sorted(rank, key=rank.get)[: min(self.size, count, len(self.d))]
        picked, short = [], []
        for place, e in enumerate(chosen):
            share = count // len(chosen) + (place < count % len(chosen))
            order = sorted(tasks[e], key=lambda i: -((self.s[i] + 1) / (self.n[i] + 2) + TIE * lottery[i]))
            level = {i: r * (self.levels + 1) // len(order) for r, i in enumerate(order)}
            goal = math.floor(self.d[e] + 0.5)
            order = sorted(order, key=lambda i: (abs(level[i] - goal), self.visits[i], -lottery[i]))
            picked += order[:share]
            short.append(share > len(order))
        return picked, any(short)


class Replayed:
    """Scores of the last visit, for learnability and for prioritised replay."""

    def __init__(self, n, kind):
        self.score, self.known, self.kind = np.zeros(n), np.zeros(n, bool), kind
        self.visits, self.last, self.step = np.zeros(n), np.full(n, -1), 0

    def observe(self, outcome):
        groups = {}
        for node, rewards in rows(outcome):
            self.visits[node] += 1
            self.last[node] = self.step
            if rewards:
                groups.setdefault(node, []).append(rewards)
        for node, parts in groups.items():
            together = [r for part in parts for r in part]
            p = np.mean(together)
            gains = [max(r - np.mean(part), 0.0) for part in parts for r in part]
            self.score[node] = p * (1 - p) if self.kind == "learnability" else np.mean(gains)
            self.known[node] = True
        self.step += 1

    def learnable(self, tie, lottery, eligible, first, count):
        best = top(self.score + TIE * tie, eligible & (self.score > 0), first)
        others = top(lottery - self.visits, [ok and i not in best for i, ok in enumerate(eligible)], count - len(best))
        return best + others, len(best)

    def weights(self, tie, staleness, temperature):
        order = sorted(np.flatnonzero(self.known), key=lambda i: (-self.score[i], tie[i]))
        by_rank, by_age = np.zeros(len(tie)), np.zeros(len(tie))
        for rank, i in enumerate(order, start=1):
            by_rank[i] = (1.0 / rank) ** (1.0 / temperature)
            by_age[i] = self.step - 1 - self.last[i]
        if by_age.sum() == 0:
            by_age = self.known.astype(float)
        return (1 - staleness) * by_rank / by_rank.sum() + staleness * by_age / by_age.sum()


class Gp:
    def __init__(self, feature, real, uid, edge, jitter, sample=512):
        self.x, self.real, self.edge, self.jitter = np.asarray(feature, np.float64), real, edge, jitter
        first = sorted(np.flatnonzero(real), key=lambda i: uid[i])[:sample]
        pairs = [np.linalg.norm(self.x[i] - self.x[j]) for a, i in enumerate(first) for j in first[:a]]
        self.width, self.m = np.median(pairs), np.zeros(len(self.x))

    def kernel(self, i, j):
        return math.exp(-((self.x[i] - self.x[j]) ** 2).sum() / (2 * self.width**2))

    def observe(self, outcome):
        batch = per_node(outcome)
        if not batch:
            return
        nodes = list(batch)
        rate = np.clip([batch[i][1] / batch[i][0] for i in nodes], self.edge, 1 - self.edge)
        seen = np.log(rate / (1 - rate))
        own = np.array([[self.kernel(i, j) + self.jitter * (i == j) for j in nodes] for i in nodes])
        weight = np.linalg.solve(own, seen - self.m[nodes])
        cross = np.array([[self.kernel(i, j) for j in nodes] for i in range(len(self.x))])
        self.m = np.where(self.real, self.m + cross @ weight, self.m)
        self.m[nodes] = seen


class Potts:
    def __init__(self, feature, real, states, neighbours, coupling, discount, strength, sweeps):
        x = np.asarray(feature, np.float64)
        near = []
        for i in range(len(x)):
            others = [j for j in range(len(x)) if j != i and real[j]]
            near.append(sorted(others, key=lambda j: -float(x[i] @ x[j]))[:neighbours] if real[i] else [])
        self.near = [[j for j in near[i] if i in near[j]] for i in range(len(x))]
        self.coupling, self.discount, self.sweeps = coupling, discount, sweeps
        level = (np.arange(states) + 0.5) / states
        self.a0, self.b0 = strength * level, strength * (1 - level)
        self.a, self.b = self.a0.copy(), self.b0.copy()
        self.q = np.full((len(x), states), 1.0 / states)
        self.n, self.s = np.zeros(len(x)), np.zeros(len(x))

    def _count(self):
        self.a = self.a0 + sum(self.q[i] * self.s[i] for i in range(len(self.n)))
        self.b = self.b0 + sum(self.q[i] * (self.n[i] - self.s[i]) for i in range(len(self.n)))

    def observe(self, outcome):
        self.n, self.s = self.discount * self.n, self.discount * self.s
        batch = per_node(outcome)
        for i, (n, s) in batch.items():
            self.n[i] += n
            self.s[i] += s
        if not batch:
            return
        for _ in range(self.sweeps):
            self._count()
            up, down = digamma(self.a) - digamma(self.a + self.b), digamma(self.b) - digamma(self.a + self.b)
            new = np.zeros_like(self.q)
            for i in range(len(self.n)):
                log = self.s[i] * up + (self.n[i] - self.s[i]) * down
                for j in self.near[i]:
                    log = log + self.coupling * self.q[j]
                new[i] = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
            self.q = new
        self._count()

    def belief(self, group_size):
        a, b = self.a, self.b
        informative = np.array([mixed(x, y, group_size) for x, y in zip(a, b, strict=True)])
        return self.q @ (a / (a + b)), self.q @ (a * b / ((a + b) * (a + b + 1))), self.q @ informative


class GpsLite:
    def __init__(self, feature, weights, learning_rate, updates, diversity):
        self.x, self.w = np.asarray(feature, np.float64), np.asarray(weights, np.float64)
        self.bias, self.out, self.offset = np.zeros(self.w.shape[1]), np.zeros(self.w.shape[1]), 0.0
        self.rate, self.updates, self.diversity = learning_rate, updates, diversity
        self.direction, self.level, self.last = np.zeros(self.x.shape[1]), 0.0, []

    def inputs(self, nodes):
        x = self.x[nodes]
        return np.concatenate([x, (x @ self.direction)[:, None], np.full((len(x), 1), self.level)], axis=1)

    def predict(self):
        logit = np.tanh(self.inputs(np.arange(len(self.x))) @ self.w + self.bias) @ self.out + self.offset
        return 1 / (1 + np.exp(-logit))

    def observe(self, outcome):
        batch = [(i, len(r), sum(min(max(x, 0.0), 1.0) for x in r)) for i, r in rows(outcome) if r]
        if not batch:
            return
        nodes, n, s = (np.array(x) for x in zip(*batch, strict=True))
        z = self.inputs(nodes)
        for _ in range(self.updates):
            hidden = np.tanh(z @ self.w + self.bias)
            error = (n / (1 + np.exp(-(hidden @ self.out + self.offset))) - s) / n.sum()  # d loss / d logit
            back = error[:, None] * self.out[None, :] * (1 - hidden**2)
            self.w, self.bias = self.w - self.rate * z.T @ back, self.bias - self.rate * back.sum(axis=0)
            self.out, self.offset = self.out - self.rate * hidden.T @ error, self.offset - self.rate * error.sum()
        rate = s / n
        self.direction = np.mean([(r - rate.mean()) * self.x[i] for r, i in zip(rate, nodes, strict=True)], axis=0)
        self.level, self.last = rate.mean() - 0.5, list(nodes)

    def select(self, lottery, eligible, count):
        p, picked = self.predict(), []
        for _ in range(count):
            score = {}
            for i in np.flatnonzero(eligible):
                if i not in picked:
                    score[i] = -((p[i] - 0.5) ** 2) + TIE * lottery[i]
                    for others in (picked, self.last):
                        if others:
                            score[i] += self.diversity * np.mean([1 - self.x[i] @ self.x[j] for j in others])
            picked.append(max(score, key=score.get))
        return picked
