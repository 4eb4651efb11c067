"""Users who talk with a model: by a script, or played by another model behind an HTTP endpoint."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from envsched_jax.environments.conversation import ConversationError

STOPS = ("###STOP###", "finish conversation")  # how tau-bench's and ACEBench's users end a conversation
_PLAY = """You play a customer who writes to a service agent. What you want, and all that you know:

{instruction}

Write the customer's next message and nothing else, in one line, in your own words. Tell only what this step needs, and
answer what is asked. Never invent what is not written above: say that you do not know it. Once you have what you came
for, or it is clear that you cannot get it, write {stop} and nothing else."""


class User(Protocol):
    """One who wants something. A message with one of ``STOPS`` in it ends the conversation and is not shown."""

    def opening(self) -> str:
        """Begins a conversation and returns the first message."""
        ...

    def answer(self, said: str) -> str:
        """Returns the next message, after what the model said without a call of a tool."""
        ...


MakeUser = Callable[[str], User]  # of a task's instruction


def stops(text: str) -> bool:
    """Tells whether a user's message ends the conversation."""
    return any(stop in text for stop in STOPS)


class ScriptedUser:
    """Says the given lines one after another, whatever is said to them, and then stops."""

    def __init__(self, lines: Sequence[str]) -> None:
        """Takes the lines, at least one."""
        if not lines or isinstance(lines, str):
            raise ValueError(f"lines: expected a sequence of at least one line, got {lines!r}")
        self._lines, self._next = tuple(lines), 0

    def opening(self) -> str:
        """Returns the first line."""
        self._next = 1
        return self._lines[0]

    def answer(self, said: str) -> str:
        """Returns the next line, or the mark of the end."""
        self._next += 1
        return self._lines[self._next - 1] if self._next <= len(self._lines) else STOPS[0]


def plain(instruction: str) -> ScriptedUser:
    """Returns a user who says the whole instruction at once and then stops: no second model, and one turn only."""
    return ScriptedUser((instruction,))


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nothing: the key of an endpoint is for no other."""

    def redirect_request(self, *unused: Any) -> None:
        """Returns that there is nothing to follow, so that the answer is an error."""


_OPENER = urllib.request.build_opener(_Stay)


class ServedUser:
    """Played by a model behind an OpenAI-compatible endpoint.

    ``functools.partial(ServedUser, url, model)`` makes users of instructions, also in another process.
    """

    def __init__(
        self,
        url: str,
        model: str,
        instruction: str,
        *,
        greeting: str = "Hello, how can I help you?",
        key_name: str = "",
        temperature: float = 0.0,
        max_tokens: int = 512,
        timeout: float = 30.0,
        tries: int = 3,
        backoff: float = 1.0,
    ) -> None:
        """Sends nothing yet.

        Args:
          url: of the endpoint, up to and with its version, such as ``http://localhost:8000/v1``.
          model: the name that the endpoint knows it by.
          instruction: what the user wants and knows.
          greeting: what the agent is taken to have said before the first message.
          key_name: name of the environment variable with the endpoint's key; empty if it needs none.
          temperature: of sampling.
          max_tokens: of one message.
          timeout: seconds for each try.
          tries: how often a request is sent before its failure counts; only failures that may pass are tried again.
          backoff: seconds before the second try, doubled before each further one.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: expected http:// or https://, got {url!r}")
        if tries < 1:
            raise ValueError(f"tries: expected at least 1, got {tries}")
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._start = [
            {"role": "system", "content": _PLAY.format(instruction=instruction, stop=STOPS[0])},
            {"role": "user", "content": greeting},
        ]
        self._key_name, self._timeout, self._tries, self._backoff = key_name, timeout, tries, backoff
        self._messages: list[dict[str, str]] = []

    def opening(self) -> str:
        """Begins anew and returns the first message; raises ConversationError as ``answer`` does."""
        self._messages = list(self._start)
        return self._say()

    def answer(self, said: str) -> str:
        """Returns the next message.

        Raises:
          ConversationError: the endpoint did not answer in time (env_timeout), or not as it should (env_error).
        """
        self._messages.append({"role": "user", "content": said})
        return self._say()

    def _say(self) -> str:
        text = self._text(self._ask())
        self._messages.append({"role": "assistant", "content": text})
        return text

    def _ask(self) -> bytes:
        status, why = "env_error", ""
        for attempt in range(self._tries):
            if attempt:
                time.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                with _OPENER.open(self._request(), timeout=self._timeout) as response:
                    return bytes(response.read())
            except urllib.error.HTTPError as error:
                with error:
                    why = f"HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
                status = "env_error"
                if error.code != 429 and error.code < 500:
                    break  # the same request would be refused again
            except (OSError, http.client.HTTPException) as error:
                late = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
                status = "env_timeout" if late else "env_error"
                why = f"no answer within {self._timeout:g} s" if late else f"{type(error).__name__}: {error}"
        raise ConversationError(status, f"user at {self._url}: {why}")

    def _request(self) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self._key_name:
            key = os.environ.get(self._key_name)
            if not key:
                raise ConversationError("env_error", f"environment variable {self._key_name} is not set")
            headers["Authorization"] = f"Bearer {key}"
        body = json.dumps({**self._settings, "messages": self._messages}).encode()
        return urllib.request.Request(self._url, body, headers)

    def _text(self, body: bytes) -> str:
        try:
            value: Any = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            value = None
        text = value.rsplit("</think>", 1)[-1].strip() if isinstance(value, str) else ""
        if not text:
            start = body[:200].decode("utf-8", "replace")
            raise ConversationError("env_error", f"user at {self._url}: expected choices[0].message.content: {start}")
        return text
