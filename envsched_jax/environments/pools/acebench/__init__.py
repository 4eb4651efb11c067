"""The TFDS data set of ACEBench-Agent's pool; the builder is in ``acebench_dataset_builder``."""
