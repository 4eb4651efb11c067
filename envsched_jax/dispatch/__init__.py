"""Between a scheduler and a trainer: tickets, outcomes in any order, a journal, executors of environments."""

from envsched_jax.dispatch.dispatcher import Dispatcher
from envsched_jax.dispatch.engine import Change
from envsched_jax.dispatch.executor import AsyncExecutor, Executor, ExecutorError, Rollout
from envsched_jax.dispatch.journal import JournalError, load_state, save_state
from envsched_jax.dispatch.ledger import Limits
from envsched_jax.dispatch.loop import drive
from envsched_jax.dispatch.processes import ProcessExecutor
from envsched_jax.dispatch.ray_executor import RayExecutor
from envsched_jax.dispatch.tickets import DispatchError, Feedback, Ticket, feedback

__all__ = [
    "AsyncExecutor",
    "Change",
    "DispatchError",
    "Dispatcher",
    "Executor",
    "ExecutorError",
    "Feedback",
    "JournalError",
    "Limits",
    "ProcessExecutor",
    "RayExecutor",
    "Rollout",
    "Ticket",
    "drive",
    "feedback",
    "load_state",
    "save_state",
]
