"""The TFDS data set of a pool; the builder is in ``jsonl_pool_dataset_builder``."""
