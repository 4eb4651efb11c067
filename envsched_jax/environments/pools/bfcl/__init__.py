"""The TFDS data set of BFCL's pool; the builder is in ``bfcl_dataset_builder``."""
