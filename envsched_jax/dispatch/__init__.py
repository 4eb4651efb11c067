"""Between a scheduler and a trainer: tickets, outcomes in any order, a journal, executors of environments."""

from envsched_jax.dispatch.dispatcher import Dispatcher
from envsched_jax.dispatch.engine import Change
from envsched_jax.dispatch.journal import JournalError
from envsched_jax.dispatch.ledger import Limits
from envsched_jax.dispatch.tickets import DispatchError, Feedback, Ticket, feedback

__all__ = ["Change", "DispatchError", "Dispatcher", "Feedback", "JournalError", "Limits", "Ticket", "feedback"]
