"""The dual-relation graph of a pool: features, nearest neighbours, patterns and their assembly."""

from envsched_jax.graph.build import Index, bucket, build, rewire, task_uid

__all__ = ["Index", "bucket", "build", "rewire", "task_uid"]
