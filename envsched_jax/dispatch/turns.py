"""Whose turn it is: bounded concurrency, fair over environments, oldest ticket first."""

import asyncio
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from envsched_jax.dispatch.tickets import DispatchError

Waiter = tuple[int, int, asyncio.Future[None]]  # ticket, number of the rollout


class Turns:
    """Lets so many rollouts run at once.

    A free place goes to the environment that has the fewest rollouts running, of those below their own limit; between
    equals to the one with the oldest ticket. Within an environment, older tickets go first.
    """

    def __init__(self, places: int, per_env: int | Mapping[str, int] | None) -> None:
        """Starts empty.

        Args:
          places: rollouts at once.
          per_env: of one environment, for all of them or by env_id; those that are not named are bounded by ``places``.

        Raises:
          DispatchError: a bound is below 1.
        """
        by_env = dict(per_env) if isinstance(per_env, Mapping) else {}
        everywhere = per_env if isinstance(per_env, int) else places
        named = ((f"per_env[{env_id!r}]", bound) for env_id, bound in by_env.items())
        for where, bound in (("rollouts at once", places), ("per_env", everywhere), *named):
            if not isinstance(bound, int) or isinstance(bound, bool) or bound < 1:
                raise DispatchError(f"{where}: expected at least 1, got {bound!r}")
        self._places, self._everywhere, self._by_env = places, everywhere, by_env
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[Waiter]] = {}

    @asynccontextmanager
    async def turn(self, env_id: str, ticket_id: int, number: int) -> AsyncIterator[None]:
        """Waits for a place and holds it."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting.setdefault(env_id, []), (ticket_id, number, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._running[env_id] -= 1
                self._grant()

    def _grant(self) -> None:
        while self._running.total() < self._places:
            for env_id in list(self._waiting):
                queue = self._waiting[env_id]
                while queue and queue[0][2].done():  # its caller gave up
                    heapq.heappop(queue)
                if not queue:
                    del self._waiting[env_id]
            able = [e for e in self._waiting if self._running[e] < self._by_env.get(e, self._everywhere)]
            if not able:
                return
            env_id = min(able, key=lambda e: (self._running[e], self._waiting[e][0][:2]))
            heapq.heappop(self._waiting[env_id])[2].set_result(None)
            self._running[env_id] += 1
