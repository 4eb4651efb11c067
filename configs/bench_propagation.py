"""Throughput of propagation beside the alternatives. Presets: `cpu` (the default), `gpu`, `tpu` and `smoke`."""

from ml_collections import ConfigDict

JAX_VARIANTS = ("diffuse", "jraph", "segment_sum", "bcoo", "bcsr")
CPU_VARIANTS = ("scipy_csr", "torch_csr", "torch_embedding_bag", "pyg")  # torch's are left out where it is missing


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.bench_propagation`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("cpu", "gpu", "tpu", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: cpu, gpu, tpu, smoke")
    smoke, accelerator = preset == "smoke", preset in ("gpu", "tpu")
    config = ConfigDict()
    ours = ("diffuse", "diffuse_bfloat16") if accelerator else ("diffuse", "diffuse_native")
    config.variants = (*ours, *JAX_VARIANTS[1:], *(() if accelerator else CPU_VARIANTS))
    config.nodes = (500,) if smoke else (10_000, 100_000, 1_000_000)
    # Rounds in one call, per size: enough that starting a call does not count.
    config.rounds = (2,) if smoke else (100, 50, 20) if accelerator else (20, 4, 2)
    config.orders = ("random", "environment")
    config.k = 4 if smoke else 16  # neighbours per relation
    config.relations = 2
    config.channels = 8
    config.restart = 0.1
    config.seed = 0
    config.repeats = 3 if smoke else 15  # turns of every variant
    config.seconds = 0.1 if smoke else 2.0  # of a variant on one graph, after three turns
    config.copy_mib = 1 if smoke else 512  # array whose copy is the bandwidth of main memory
    return config
