"""The dual-relation graph of a pool: features, nearest neighbours, patterns, their assembly, and growth."""

from envsched_jax.graph.build import Index, bucket, build, rewire, task_uid
from envsched_jax.graph.grow import extend, restore, retire, retired

__all__ = ["Index", "bucket", "build", "extend", "restore", "retire", "retired", "rewire", "task_uid"]
