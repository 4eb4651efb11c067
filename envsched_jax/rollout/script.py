"""What happens in one rollout: a model, tools and a user take turns until it is over or has used up its limits."""

import dataclasses
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from envsched_jax.environments.calls import CallError
from envsched_jax.environments.conversation import ConversationError
from envsched_jax.policy.chat import Chat


class Limits(NamedTuple):
    """What a rollout may use.

    Attributes:
      context: ids of prompt, answers and observations together.
      answer: ids of one answer.
      answers: answers of one turn of the model; the benchmark BFCL allows 20.
      result: characters of one tool's result; the rest is cut.
    """

    context: int = 2048
    answer: int = 512
    answers: int = 20
    result: int = 4000


@dataclasses.dataclass
class Transcript:
    """One rollout.

    Attributes:
      task_id: of the task.
      member: number within its group.
      prompt: ids that the model read first.
      ids: what came after, answers and observations.
      mask: of ``ids``, true for what the model sampled.
      log_prob: of ``ids``, of what was sampled at the temperature used, else 0.
      progress: in [0, 1]; None where the environment failed.
      success: likewise.
      status: name of a ``Status`` in small letters.
      error: what failed.
      answers: of the model.
      calls: that were executed.
      attempts: answers that called, or tried to.
      refused: answers among them that could not be parsed.
      seconds: from its start to its end.
    """

    task_id: str
    member: int
    prompt: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    mask: list[bool] = dataclasses.field(default_factory=list)
    log_prob: list[float] = dataclasses.field(default_factory=list)
    progress: float | None = None
    success: bool | None = None
    status: str = "ok"
    error: str = ""
    answers: int = 0
    calls: int = 0
    attempts: int = 0
    refused: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Ids that were sampled."""
        return sum(self.mask)

    def add(self, ids: Sequence[int], log_prob: Sequence[float] | None = None) -> None:
        """Appends an answer, or an observation, which has no log-probabilities."""
        self.ids += ids
        self.mask += [log_prob is not None] * len(ids)
        self.log_prob += [0.0] * len(ids) if log_prob is None else log_prob


class Ask(NamedTuple):
    """A script waits for its environment."""

    method: str
    args: tuple[Any, ...] = ()


class Say(NamedTuple):
    """A script waits for an answer of the model, which reads these ids first."""

    ids: list[int]


class Said(NamedTuple):
    """An answer of the model."""

    ids: list[int]
    log_prob: list[float]
    ended: bool  # by itself, not cut


def script(transcript: Transcript, chat: Chat, limits: Limits) -> Generator[Ask | Say, Any, None]:
    """Conducts one rollout: yields what it waits for, is sent the answers, and fills in the transcript."""
    messages, tools = yield Ask("opening")
    fresh = transcript.prompt = chat.opening(messages, tools)
    if len(fresh) >= limits.context:
        raise ConversationError("infra_error", f"a prompt of {len(fresh)} ids: the context is {limits.context}")
    in_turn = 0
    while True:
        said: Said = yield Say(fresh)
        transcript.add(said.ids, said.log_prob)
        transcript.answers, in_turn = transcript.answers + 1, in_turn + 1
        if not said.ended:
            transcript.status = "truncated"
            break
        text = chat.tokenizer.decode(said.ids)
        try:
            calls = chat.calls(text)
        except CallError as error:
            transcript.attempts, transcript.refused = transcript.attempts + 1, transcript.refused + 1
            following = chat.results([f"Error: {error}"])
        else:
            if calls:
                transcript.attempts += 1
                results = []
                for call in calls:
                    try:
                        result = yield Ask("call", (call,))
                        transcript.calls += 1
                    except CallError as error:
                        result = f"Error: {error}"
                    results.append(result if len(result) <= limits.result else f"{result[: limits.result]} ... (cut)")
                if (yield Ask("done")):
                    break
                following = chat.results(results)
            else:
                following = yield Ask("reply", (text,))
                if not following:
                    break
                in_turn = 0
        fresh = chat.following(following)
        used = len(transcript.prompt) + len(transcript.ids) + len(fresh)
        if in_turn >= limits.answers or used >= limits.context:
            transcript.status = "truncated"
            break
        transcript.add(fresh)
    transcript.progress, transcript.success = yield Ask("score")


def summarise(transcripts: Sequence[Transcript]) -> dict[str, float]:
    """Returns what a set of rollouts was like: shares of statuses and parsable calls, ids and answers per rollout."""
    count, status = max(len(transcripts), 1), Counter(one.status for one in transcripts)
    attempts = sum(one.attempts for one in transcripts)
    return {
        "rollouts": len(transcripts),
        "tokens": sum(one.tokens for one in transcripts),
        "answers_per_rollout": sum(one.answers for one in transcripts) / count,
        "calls": sum(one.calls for one in transcripts),
        "calling_answers": attempts,
        "parsable_share": 1.0 - sum(one.refused for one in transcripts) / attempts if attempts else float("nan"),
        "truncated_share": status["truncated"] / count,
        "failed_share": sum(n for name, n in status.items() if name not in ("ok", "truncated")) / count,
    }
