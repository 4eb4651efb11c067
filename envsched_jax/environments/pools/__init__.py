"""TFDS data sets of the environments' pools, one package each; read them with ``pool.datasets.read_tfds``."""
