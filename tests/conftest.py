"""Strictness for every test: no silent rank promotion, warnings are errors, strict dtypes in the scheduler modules."""

import os
from pathlib import Path

# Small test programs gain nothing from many threads, and two test processes would fight for the cores.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("MPLBACKEND", "agg")

import jax
import pytest

STRICT_DTYPES = (
    "test_pool",
    "test_graph",
    "test_belief",
    "test_select",
    "test_schedulers",
    "test_envsched_settings",
    "test_static",
    "test_logdet",
    "test_cost",
    "test_partial",
    "test_baselines",
    "test_field",
)

jax.config.update("jax_numpy_rank_promotion", "raise")
cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "envsched_jax" / "jax_tests"
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(autouse=True)
def strict_dtypes(request):
    """Strict dtype promotion in the modules that promise it; optax does not pass under it."""
    strict = request.module.__name__.rsplit(".", 1)[-1] in STRICT_DTYPES
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield
