"""What the agent loop needs of an environment on the host: one conversation between a model, tools and a user.

A conversation may hang, leak or crash; `Hosted` gives each a process of its own and a limit for every request.
"""

import functools
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from envsched_jax.environments.calls import Call, CallError

Message = dict[str, Any]  # role, content, and what else a chat template reads
Schema = dict[str, Any]  # name, description, and JSON schema of the parameters, of a tool
START_SECONDS = 120.0  # for a process to import an environment; more is a mistake
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class ConversationError(RuntimeError):
    """The environment failed, not the policy. This rollout has no reward.

    ``status`` is env_timeout, env_error or infra_error.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Conversation(Protocol):
    """One rollout of one task. The model's turn lasts until it answers without a call.

    Every method takes and returns plain values, so that a conversation can live in another process.
    """

    def opening(self) -> tuple[list[Message], list[Schema]]:
        """Returns what the model reads first, the last message a user's, and the tools that it may call."""
        ...

    def call(self, call: Call) -> str:
        """Executes a call and returns what the model is to read; what a tool refuses is such a text, too.

        Raises:
          CallError: there is no such tool; nothing has happened.
        """
        ...

    def reply(self, text: str) -> list[Message]:
        """Takes an answer without calls, which ends the turn; returns what comes next, nothing if it is over."""
        ...

    def done(self) -> bool:
        """Tells whether it is over; a call may end it."""
        ...

    def score(self) -> tuple[float, bool]:
        """Returns progress in [0, 1] and whether the task is solved, of a conversation ended at any point."""
        ...


class Hosted:
    """A conversation in a process of its own. Requests are sent with ``ask`` and answered at ``answer``, one at a time.

    A request past its limit, and a process that ends, raise ConversationError then and ever after. Processes import the
    script that was started, as those of `multiprocessing` do: keep its main part under ``if __name__ == "__main__"``.
    """

    def __init__(self, make: Callable[..., Conversation], *args: Any, limit: float = 10.0) -> None:
        """Begins to start it.

        Args:
          make: function at the top of a module; makes the conversation.
          *args: of ``make``.
          limit: seconds for each request; making the conversation does not count.
        """
        self._limit, self._failure, self._deadline = limit, "", time.monotonic() + START_SECONDS
        context: Any = multiprocessing.get_context(_METHOD)
        if _METHOD == "forkserver":
            source = make.func if isinstance(make, functools.partial) else make
            context.set_forkserver_preload([__name__, source.__module__])  # imported once for all processes
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self._status = "env_error"

    def ask(self, method: str, *args: Any) -> None:
        """Sends a request: the name of a method of a conversation, and its arguments."""
        self._check()
        try:
            self._pipe.send((method, args))
        except OSError:
            self._fail("env_error", "its process ended")
        self._deadline = max(self._deadline, time.monotonic() + self._limit)

    def ready(self) -> bool:
        """Tells whether ``answer`` returns, or raises, at once."""
        return bool(self._failure) or self._pipe.poll() or time.monotonic() >= self._deadline

    def answer(self) -> Any:
        """Waits for the answer to the last request.

        Raises:
          CallError: of the method.
          ConversationError: the environment failed, or was too slow.
        """
        self._check()
        if not self._pipe.poll(max(self._deadline - time.monotonic(), 0.0)):
            self._fail("env_timeout", f"no answer within {self._limit:g} s")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            self._fail("env_error", "its process ended")
        except Exception as error:  # a class that is known to the environment only, say
            self._fail("env_error", f"its answer cannot be read: {type(error).__name__}: {error}")
        self._deadline = 0.0  # the next request has its own limit
        if kind == "refused":
            raise CallError(value)
        if kind != "value":
            self._fail(kind, value)
        return value

    def close(self) -> None:
        """Ends the process, whatever it is doing; later requests fail."""
        self._failure = self._failure or "it was closed"
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _check(self) -> None:
        if self._failure:
            raise ConversationError(self._status, self._failure)

    def _fail(self, status: str, message: str) -> None:
        self._status, self._failure = status, message
        self.close()
        raise ConversationError(status, message)


def _serve(pipe: Connection, make: Callable[..., Conversation], args: tuple[Any, ...]) -> None:
    conversation: Conversation | None = None
    while True:
        try:
            method, values = pipe.recv()
        except EOFError:
            return
        try:
            if conversation is None:
                conversation = make(*args)
            pipe.send(("value", getattr(conversation, method)(*values)))
            continue
        except CallError as error:  # which elsewhere than in a call is not the policy's fault
            answer = "refused" if method == "call" else "env_error", str(error)
        except ConversationError as error:  # of a user simulator, say
            answer = error.status, str(error)
        except Exception as error:  # whatever an environment raises is its failure, not the policy's
            answer = "env_error", f"{type(error).__name__}: {error}"[-2000:]
        pipe.send(answer)
