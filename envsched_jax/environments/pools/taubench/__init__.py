"""The TFDS data set of tau-bench's pool; the builder is in ``taubench_dataset_builder``."""
