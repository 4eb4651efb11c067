"""Environment-aware scheduling of agent rollouts: which (environment, task) pairs still teach, on the accelerator."""

from envsched_jax.belief.propagate import diffuse, diffuse_edges, diffuse_native
from envsched_jax.dispatch import Dispatcher, DispatchError, JournalError, Limits, Ticket
from envsched_jax.graph import Index
from envsched_jax.graph import build as build_graph
from envsched_jax.pool import PoolError, Record, Verifier, read_jsonl, write_jsonl
from envsched_jax.schedulers import RECIPES
from envsched_jax.schedulers import make as make_scheduler
from envsched_jax.types import (
    EDGE_KINDS,
    Batch,
    Belief,
    Graph,
    History,
    Outcome,
    Scheduler,
    SchedulerState,
    Status,
    is_valid,
    outcome_of,
)

__all__ = [
    "Batch",
    "Belief",
    "DispatchError",
    "Dispatcher",
    "EDGE_KINDS",
    "Graph",
    "History",
    "Index",
    "JournalError",
    "Limits",
    "Outcome",
    "PoolError",
    "RECIPES",
    "Record",
    "Scheduler",
    "SchedulerState",
    "Status",
    "Ticket",
    "Verifier",
    "build_graph",
    "diffuse",
    "diffuse_edges",
    "diffuse_native",
    "is_valid",
    "make_scheduler",
    "outcome_of",
    "read_jsonl",
    "write_jsonl",
]
