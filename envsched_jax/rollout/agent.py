"""Conversations of a language model with host environments: many in flight, decoded in one batch.

Each rollout is a script that asks its environment and has ids sampled; `Agent.play` serves all of them at once. Slots
of the decoder are never held by one that is over, and the others go on while one waits for its environment.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.environments.calls import CallError
from envsched_jax.environments.conversation import ConversationError
from envsched_jax.policy.chat import Chat
from envsched_jax.policy.transformer import Transformer
from envsched_jax.rollout import slots as device
from envsched_jax.rollout.script import Ask, Limits, Said, Say, Transcript, script
from envsched_jax.types import Key

PAUSE = 0.001  # seconds between two looks at environments while nothing can be decoded


class Requests(Protocol):
    """A conversation that answers later, such as ``conversation.Hosted``."""

    def ask(self, method: str, *args: Any) -> None:
        """Sends a request."""
        ...

    def ready(self) -> bool:
        """Tells whether ``answer`` would return or raise at once."""
        ...

    def answer(self) -> Any:
        """Returns the answer; raises CallError or ConversationError."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Pace(NamedTuple):
    """Where the time of a call of ``play`` went, in seconds, and what was done in it."""

    read: float  # prompts and observations
    decode: float
    wait: float  # for environments, with nothing to decode
    ids_read: int
    ids_decoded: int


class _Rollout:
    """A script, its environment, and what it waits for."""

    def __init__(self, transcript: Transcript, steps: Generator[Ask | Say, Any, None], environment: Requests) -> None:
        self.transcript, self.steps, self.environment = transcript, steps, environment
        self.started = time.monotonic()
        self.slot: int | None = None
        self.waits: Ask | Say | None = None
        self.said: list[int] = []
        self.log_prob: list[float] = []

    def go_on(self, value: Any) -> None:
        """Sends or throws into the script what it waits for."""
        try:
            self.waits = self.steps.throw(value) if isinstance(value, Exception) else self.steps.send(value)
            if isinstance(self.waits, Ask):
                self.environment.ask(self.waits.method, *self.waits.args)
        except StopIteration:
            self._end()
        except ConversationError as error:
            self.transcript.status, self.transcript.error = error.status, str(error)
            self._end()

    def heard(self) -> None:
        """Takes what the environment has answered."""
        try:
            value = self.environment.answer()
        except (CallError, ConversationError) as error:
            value = error
        self.go_on(value)

    def sampled(self, ids: list[int], log_prob: list[float], ended: bool, limits: Limits) -> None:
        """Takes ids of an answer; goes on when it has ended or has used up what it may."""
        self.said += ids
        self.log_prob += log_prob
        if ended or self.left(limits) == 0:
            said, self.said, odds, self.log_prob = self.said, [], self.log_prob, []
            self.go_on(Said(said, odds, ended))

    def left(self, limits: Limits) -> int:
        """Returns how many ids more the answer under way may have."""
        used = len(self.transcript.prompt) + len(self.transcript.ids) + len(self.said)
        return min(limits.answer - len(self.said), limits.context - used)

    def _end(self) -> None:
        self.waits = None
        self.environment.close()
        self.transcript.seconds = time.monotonic() - self.started


class Agent:
    """A model that talks with environments."""

    def __init__(
        self,
        chat: Chat,
        limits: Limits,
        *,
        slots: int,
        temperature: float = 1.0,
        chunk: int = 16,
        piece: int = 64,
        ahead: int = 4,
        capacity: int = 512,
        place: Callable[[device.Slots], device.Slots] = lambda slots: slots,
    ) -> None:
        """Allocates nothing yet.

        Args:
          chat: of the model.
          limits: of every rollout.
          slots: conversations that are decoded at once.
          temperature: of sampling; 0 takes the most likely id.
          chunk: ids decoded between two looks at the environments.
          piece: ids of a prompt or an observation read at a time; the last piece is filled up.
          ahead: environments that are started before there is a slot for them.
          capacity: positions of a slot in the beginning; where more are needed they are doubled, which takes the memory
            of both for a moment.
          place: lays the slots out over devices.

        Raises:
          ValueError: a number is out of range.
        """
        for name, value, least in (
            ("slots", slots, 1),
            ("chunk", chunk, 1),
            ("piece", piece, 1),
            ("ahead", ahead, 0),
            ("capacity", capacity, 1),
            ("temperature", temperature, 0),
        ):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        self._chat, self._limits = chat, limits
        self._slots, self._temperature, self._chunk, self._piece, self._ahead = slots, temperature, chunk, piece, ahead
        self._capacity, self._place = capacity, place
        self.pace = Pace(0.0, 0.0, 0.0, 0, 0)  # of the last call of play

    def play(
        self, model: Transformer, key: Key, jobs: Sequence[tuple[str, int]], make: Callable[[str], Requests]
    ) -> list[Transcript]:
        """Makes rollouts.

        What is sampled depends on the key, the task, the member and the weights, up to rounding.

        Args:
          model: of ids one per position.
          key: consumed.
          jobs: task and member of each rollout, all different; those of a task that begin alike share what is read.
          make: begins a conversation about a task.

        Returns:
          The transcripts, in the order of the jobs.
        """
        run = _Run(
            self._limits,
            model,
            self._chat.tokenizer.eos,
            self._slots,
            temperature=self._temperature,
            chunk=self._chunk,
            piece=self._piece,
            capacity=self._capacity,
            place=self._place,
        )
        waiting, live, done = deque(jobs), list[_Rollout](), dict[tuple[str, int], Transcript]()
        keys = dict(zip(jobs, _keys(key, jobs), strict=True))
        try:
            while waiting or live:
                while waiting and len(live) < self._slots + self._ahead:
                    task_id, member = waiting.popleft()
                    transcript = Transcript(task_id, member)
                    live.append(_Rollout(transcript, script(transcript, self._chat, self._limits), make(task_id)))
                    live[-1].go_on(None)
                heard = False
                for one in live:
                    while isinstance(one.waits, Ask) and one.environment.ready():
                        one.heard()
                        heard = True
                for one in [one for one in live if one.waits is None]:
                    live.remove(one)
                    run.free(one)
                    done[_job(one)] = one.transcript
                if not run.step(live, keys) and not heard and live:
                    time.sleep(PAUSE)
                    run.waited += PAUSE
        finally:
            for one in live:
                one.environment.close()
        self.pace = Pace(run.reading, run.decoding, run.waited, run.ids_read, run.ids_decoded)
        return [done[job] for job in jobs]


def _keys(key: Key, jobs: Sequence[tuple[str, int]]) -> list[Key]:
    """Returns a key for every rollout that depends on its task and member only."""
    uid = jnp.asarray([zlib.crc32(task_id.encode()) for task_id, _ in jobs], jnp.uint32)
    member = jnp.asarray([number for _, number in jobs], jnp.uint32)
    fold = jax.vmap(jax.random.fold_in)
    return list(fold(jax.vmap(jax.random.fold_in, (None, 0))(key, uid), member))


class _Run:
    """The slots during one call of ``play``."""

    def __init__(
        self,
        limits: Limits,
        model: Transformer,
        eos: tuple[int, ...],
        size: int,
        *,
        temperature: float,
        chunk: int,
        piece: int,
        capacity: int,
        place: Callable[[device.Slots], device.Slots],
    ) -> None:
        self._limits, self._model, self._eos = limits, model, eos
        self._temperature, self._chunk, self._piece, self._place = temperature, chunk, piece, place
        self._capacity = min(capacity, limits.context)
        self._slots = place(device.empty(model, size, self._capacity))
        self._free = list(range(size))[::-1]
        self._filled = [0] * size  # positions in the cache
        self._read: set[int] = set()  # slots whose answers are under way
        self.reading = self.decoding = self.waited = 0.0
        self.ids_read = self.ids_decoded = 0

    def free(self, one: _Rollout) -> None:
        """Takes back the slot of a rollout that is over."""
        if one.slot is not None:
            self._free.append(one.slot)
            self._read.discard(one.slot)

    def step(self, live: Sequence[_Rollout], keys: dict[tuple[str, int], Key]) -> bool:
        """Reads and samples for all that wait for the model; false if there is none."""
        wanted = [one for one in live if isinstance(one.waits, Say)]
        begun = time.perf_counter()
        self._admit([one for one in wanted if one.slot is None], keys)
        for one in wanted:
            if one.slot is not None and one.slot not in self._read:
                self._observe(one)
        now = time.perf_counter()
        self.reading += now - begun
        speakers = [one for one in wanted if one.slot is not None]
        if not speakers:
            return False
        self._decode(speakers)
        self.decoding += time.perf_counter() - now
        return True

    def _room(self, most: int) -> None:
        while self._capacity < most:
            self._capacity = min(2 * self._capacity, self._limits.context)
            self._slots = self._place(device.widen(self._slots, self._capacity))

    def _admit(self, new: Sequence[_Rollout], keys: dict[tuple[str, int], Key]) -> None:
        starting = new[: len(self._free)]
        alike: dict[tuple[int, ...], list[_Rollout]] = {}
        for one in starting:
            alike.setdefault(tuple(one.transcript.prompt), []).append(one)
        for prompt, group in alike.items():
            size = len(self._filled)
            to, rows = np.full(size, size, np.int32), [keys[_job(group[0])]] * size
            for place, one in enumerate(group):
                one.slot = self._free.pop()
                to[place], rows[place] = one.slot, keys[_job(one)]
                self._filled[one.slot] = len(prompt) - 1
                self._read.add(one.slot)
            drawn, source = jnp.stack(rows), int(to[0])
            first = np.asarray(prompt[:1], np.int32)
            self._slots = device.begin_compiled(self._slots, first, to[:1], drawn[:1])
            self._read_ids(source, prompt[1:], 0)
            self._slots = device.copy_compiled(self._slots, source, np.where(to == source, size, to), drawn)
        if starting:
            jax.block_until_ready(self._slots.length)

    def _observe(self, one: _Rollout) -> None:
        assert one.slot is not None and isinstance(one.waits, Say)
        self._read_ids(one.slot, one.waits.ids, self._filled[one.slot])
        jax.block_until_ready(self._slots.length)
        self._filled[one.slot] += len(one.waits.ids)
        self._read.add(one.slot)

    def _read_ids(self, slot: int, ids: Sequence[int], before: int) -> None:
        """Reads ids, piece by piece, after so many positions."""
        self._room(before + len(ids) + 1)
        for start in range(0, len(ids), self._piece):
            some = ids[start : start + self._piece]
            padded = np.zeros((1, self._piece), np.int32)
            padded[0, : len(some)] = some
            length, to = np.asarray([len(some)], np.int32), np.asarray([slot], np.int32)
            self._slots = device.read_compiled(self._model, self._slots, padded, length, to)
        self.ids_read += len(ids)

    def _decode(self, speakers: Sequence[_Rollout]) -> None:
        budget = np.zeros(len(self._filled), np.int32)
        for one in speakers:
            assert one.slot is not None
            budget[one.slot] = min(one.left(self._limits), self._chunk)
        self._room(
            min(
                max(self._filled[one.slot] for one in speakers if one.slot is not None) + self._chunk + 1,
                self._limits.context,
            )
        )
        self._slots, out = device.decode_compiled(
            self._model, self._slots, budget, tokens=self._chunk, temperature=self._temperature, eos=self._eos
        )
        ids, log_prob, length, ended = map(np.asarray, out)
        for one in speakers:
            slot = one.slot
            assert slot is not None
            count = int(length[slot])
            self._filled[slot] += count
            self.ids_decoded += count
            if ended[slot] or one.left(self._limits) == count:
                self._read.discard(slot)
            one.sampled(ids[slot, :count].tolist(), log_prob[slot, :count].tolist(), bool(ended[slot]), self._limits)


def _job(one: _Rollout) -> tuple[str, int]:
    """Returns task and member."""
    return one.transcript.task_id, one.transcript.member
