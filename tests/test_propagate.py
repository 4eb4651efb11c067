import logging
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envsched_jax.belief import native
from envsched_jax.belief.propagate import diffuse, diffuse_edges, diffuse_native, propagate

N, K, F = 300, 11, 7  # slots and channels that are no multiple of 4 or 8
RESTART, ROUNDS = 0.3, 3


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module", name="graph")
def make_graph():
    return random_graph(0, N, K, F)


@pytest.fixture(scope="module")
def kernel():
    if not native.available():
        pytest.skip(native.failure())
    yield
    native._library = None  # 'auto' is 'gather' again for the tests that follow


def random_graph(seed, nodes, slots, channels):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, nodes, (slots, nodes))
    weight = rng.random((slots, nodes)) * (rng.random((slots, nodes)) < 0.8)  # some slots are empty
    weight /= weight.sum(axis=0).max()  # rows sum to at most one
    signal = rng.normal(size=(nodes, channels))
    return jnp.asarray(table, jnp.int32), jnp.asarray(weight, jnp.float32), jnp.asarray(signal, jnp.float32)


def dense(table, weight):
    matrix = np.zeros((table.shape[1], table.shape[1]))
    np.add.at(matrix, (np.arange(table.shape[1])[None, :].repeat(table.shape[0], 0), np.asarray(table)), weight)
    return matrix


def oracle(matrix, signal, restart=RESTART, rounds=ROUNDS):
    signal = np.asarray(signal, np.float64)
    x = signal
    for _ in range(rounds):
        x = (1 - restart) * matrix @ x + restart * signal
    return x


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_gathers_equal_the_dense_matrix(graph, rounds):
    got = diffuse(*graph, restart=RESTART, rounds=rounds, method="gather")
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle(dense(*graph[:2]), graph[2], rounds=rounds), atol=2e-6)


def test_by_hand():
    table, weight = jnp.asarray([[1, 2, 0], [2, 2, 2]], jnp.int32), jnp.asarray([[0.5, 1.0, 0.0], [0.5, 0.0, 0.25]])
    x = jnp.asarray([[4.0], [8.0], [16.0]])
    assert propagate(table, weight, x)[:, 0].tolist() == [12.0, 16.0, 4.0]
    assert diffuse(table, weight, x, restart=0.25, rounds=1)[:, 0].tolist() == [10.0, 14.0, 7.0]


def test_no_slots_leave_the_restart(graph):
    table, weight, signal = jnp.zeros((0, N), jnp.int32), jnp.zeros((0, N)), graph[2]
    np.testing.assert_allclose(diffuse(table, weight, signal, restart=0.5, rounds=2), 0.5 * signal)


def test_irregular_graphs_equal_the_dense_matrix():
    rng = np.random.default_rng(1)
    receivers = rng.integers(0, 40, 200) ** 2 % 40  # squares: many nodes receive nothing, some a lot
    senders, weight = rng.integers(0, 40, 200), rng.random(200) / 20
    matrix = np.zeros((40, 40))
    np.add.at(matrix, (receivers, senders), weight)
    signal = rng.normal(size=(40, 3))
    for order in (np.arange(200), np.argsort(receivers, kind="stable")):
        edges = (jnp.asarray(a[order], d) for a, d in zip((senders, receivers, weight), "iif", strict=True))
        in_order = bool(np.all(np.diff(receivers[order]) >= 0))
        run = partial(diffuse_edges, restart=RESTART, rounds=ROUNDS, receivers_sorted=in_order)
        got = jax.jit(run)(*edges, jnp.asarray(signal, jnp.float32))
        np.testing.assert_allclose(got, oracle(matrix, signal), atol=2e-6)


def test_a_table_is_the_same_graph_as_its_edges(graph):
    table, weight, signal = graph
    receivers = jnp.tile(jnp.arange(N, dtype=jnp.int32), K)
    got = diffuse_edges(table.reshape(-1), receivers, weight.reshape(-1), signal, restart=RESTART, rounds=ROUNDS)
    np.testing.assert_allclose(got, diffuse(*graph, restart=RESTART, rounds=ROUNDS), atol=2e-6)


@pytest.mark.parametrize("restart", [0.1, 0.5])
def test_bfloat16_storage_stays_within_its_bound(graph, restart):
    got = diffuse(*graph, restart=restart, rounds=6, storage=jnp.bfloat16)
    error = np.abs(got - oracle(dense(*graph[:2]), graph[2], restart, 6)).max()
    bound = 2.0**-8 * np.abs(graph[2]).max() * sum((1 - restart) ** i for i in range(7))
    assert got.dtype == jnp.float32 and 1e-4 < error < bound < 2.0**-8 * np.abs(graph[2]).max() / restart


def test_wrong_arguments_are_named(graph):
    with pytest.raises(ValueError, match="unknown method 'magic'; there are: auto, gather, native"):
        diffuse(*graph, restart=RESTART, rounds=1, method="magic")
    with pytest.raises(ValueError, match="leave out storage"):
        diffuse(*graph, restart=RESTART, rounds=1, method="native", storage=jnp.bfloat16)


@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 11, 7), (256, 4, 8), (3000, 6, 17)])
@pytest.mark.usefixtures("kernel")
def test_native_equals_gathers(shape):
    graph = random_graph(2, *shape)
    for rounds in (0, 1, 2, 3):
        how = {"restart": RESTART, "rounds": rounds}
        got, want = diffuse_native(*graph, **how), diffuse(*graph, **how, method="gather")
        np.testing.assert_allclose(got, want, atol=1e-5 * float(np.abs(want).max()))


@pytest.mark.usefixtures("kernel")
def test_native_under_jit_and_vmap(graph):
    table, weight, signal = graph
    many = jnp.stack([signal, -2.0 * signal, signal + 1.0])
    run = jax.jit(jax.vmap(lambda s, a: diffuse_native(table, weight, s, restart=a, rounds=ROUNDS)))
    restarts = jnp.asarray([0.2, 0.3, 0.4])
    want = [oracle(dense(table, weight), s, float(a)) for s, a in zip(many, restarts, strict=True)]
    np.testing.assert_allclose(run(many, restarts), want, atol=1e-5)


@pytest.mark.usefixtures("kernel")
def test_native_has_the_derivatives_of_gathers(graph):
    table, weight, signal = graph

    def loss(method, weight, signal, restart):
        return jnp.square(diffuse(table, weight, signal, restart=restart, rounds=2, method=method)).sum()

    want = jax.grad(loss, (1, 2, 3))("gather", weight, signal, RESTART)
    got = jax.grad(loss, (1, 2, 3))("native", weight, signal, RESTART)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("node", [-1, N])
@pytest.mark.parametrize("size", [4, 1200])  # of a product before it: the error comes at the call, or while one waits
def test_native_refuses_nodes_that_do_not_exist(graph, node, size):
    table, weight, signal = graph

    @jax.jit
    def after_a_product(table, matrix):
        nothing = 0.0 * (matrix @ matrix @ matrix)[0, 0]
        return diffuse_native(table, weight, signal + nothing, restart=RESTART, rounds=1)

    with pytest.raises(jax.errors.JaxRuntimeError, match="names a node that does not exist"):
        jax.block_until_ready(after_a_product(table.at[3, 5].set(node), jnp.ones((size, size), jnp.float32)))


@pytest.mark.usefixtures("kernel")
def test_native_keeps_a_nan_where_it_is(graph):
    table, weight, signal = graph
    got = diffuse_native(table, weight, signal.at[7, 2].set(jnp.nan), restart=RESTART, rounds=1)
    reached = (np.asarray(table) == 7).any(axis=0)
    reached[7] = True
    assert np.array_equal(np.isnan(got[:, 2]), reached) and not np.isnan(np.delete(got, 2, axis=1)).any()


@pytest.fixture
def untried(monkeypatch, tmp_path):
    """The native module as in a new process with an empty cache."""
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_failure", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_no_compiler_is_said_once_and_clearly(untried, monkeypatch, caplog, graph):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert not native.available()
        with pytest.raises(native.NativeError, match=r"not available: no C\+\+ compiler found \(looked for no-"):
            diffuse_native(*graph, restart=RESTART, rounds=1)
    assert [r.getMessage() for r in caplog.records] == [
        f"{native.failure()}; use method='gather', which needs no compiler"
    ]
    assert diffuse(*graph, restart=RESTART, rounds=1).shape == (N, F)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_failed_build_tells_the_first_error_and_leaves_nothing(untried, monkeypatch, tmp_path):
    broken = tmp_path / "broken.cc"
    broken.write_text("int f() { return undeclared_name; }\n")
    monkeypatch.setattr(native, "SOURCE", broken)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(native.NativeError, match=r"failed: .*error: .*undeclared_name"):
        native.load()
    assert not native.loaded() and not any(native.cache_folder().iterdir())


def test_auto_builds_nothing(untried, graph):
    diffuse(*graph, restart=RESTART, rounds=1)
    assert not native.loaded() and native.failure() is None and not native.cache_folder().exists()


@pytest.mark.usefixtures("kernel")
def test_auto_takes_the_kernel_once_it_is_loaded(graph):
    program = jax.jit(partial(diffuse, restart=RESTART, rounds=1)).lower(*graph).as_text()
    assert (native.TARGET in program) == (jax.default_backend() == "cpu")
    stored = jax.jit(partial(diffuse, restart=RESTART, rounds=1, storage=jnp.bfloat16)).lower(*graph).as_text()
    assert native.TARGET not in stored


def test_the_source_is_shipped_with_the_package():
    assert native.SOURCE.is_file() and "XLA_FFI_DEFINE_HANDLER_SYMBOL" in native.SOURCE.read_text()
