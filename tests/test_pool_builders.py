"""The environments' pools as TFDS data sets: what is read is what `pool()` gives, without TensorFlow."""

import subprocess
import sys
from pathlib import Path

import pytest
from checkouts import clock, rental

from envsched_jax.environments import acebench, bfcl, taubench
from envsched_jax.pool.datasets import read_tfds, write_tfds
from envsched_jax.pool.records import PoolError


@pytest.mark.skipif(not bfcl.available(), reason="bfcl-eval is not installed: `make bfcl` does it")
def test_bfcl(tmp_path):
    from envsched_jax.environments.pools.bfcl.bfcl_dataset_builder import Builder

    builder = Builder(categories=["base"], data_dir=str(tmp_path))
    builder.download_and_prepare()
    assert Path(builder.data_dir) == tmp_path / "bfcl/default/1.0.0"
    assert read_tfds(builder) == read_tfds(tmp_path) == bfcl.pool(["base"])
    assert len(builder.as_data_source("pool")) == 200


def test_taubench(tmp_path):
    from envsched_jax.environments.pools.taubench.taubench_dataset_builder import Builder

    folder = rental(tmp_path / "checkout")
    builder = Builder(checkout=folder, domains=["retail"], name="rental", data_dir=str(tmp_path / "data"))
    builder.download_and_prepare()
    assert Path(builder.data_dir) == tmp_path / "data/taubench/rental/1.0.0"
    pool = taubench.pool(folder, ["retail"])
    assert read_tfds(tmp_path / "data") == pool
    assert read_tfds(write_tfds(pool, tmp_path / "plain")) == pool
    dev = Builder(checkout=folder, domains=["retail"], split="dev", name="dev", data_dir=str(tmp_path / "data"))
    dev.download_and_prepare()
    assert read_tfds(dev) == taubench.pool(folder, ["retail"], "dev")
    with pytest.raises(PoolError, match=r"envs/tool.py: no such file"):
        Builder(checkout=tmp_path, data_dir=str(tmp_path))


def test_acebench(tmp_path):
    from envsched_jax.environments.pools.acebench.acebench_dataset_builder import Builder

    folder = clock(tmp_path / "checkout")
    builder = Builder(checkout=folder, data_dir=str(tmp_path / "data"))
    builder.download_and_prepare()
    assert Path(builder.data_dir) == tmp_path / "data/acebench/default/1.0.0"
    assert read_tfds(tmp_path / "data") == acebench.pool(folder)


def test_tensorflow_is_not_imported(tmp_path):
    code = (
        "import sys; from checkouts import clock;"
        "from envsched_jax.environments.pools.acebench.acebench_dataset_builder import Builder;"
        "from envsched_jax.pool.datasets import read_tfds;"
        "from pathlib import Path; folder = Path(sys.argv[1]);"
        "builder = Builder(checkout=clock(folder / 'checkout'), data_dir=str(folder / 'data'));"
        "builder.download_and_prepare(); assert len(read_tfds(builder)) == 4;"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=Path(__file__).parent)
