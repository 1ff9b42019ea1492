"""Many questions to several servers at once."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

from tepo_nemo.config.server import ServerConfig
from tepo_nemo.rollout.protocol import RolloutError
from tepo_nemo.rollout.server.completions import PATH, Answer, Question, Vocabulary, read_answer
from tepo_nemo.rollout.server.connection import Connection, ServerFault, ServerGone
from tepo_nemo.rollout.server.engines import Engine, Instance
from tepo_nemo.rollout.server.retries import pauses

_SPARE_S = 5.0  # for threads to notice that the time is over


@dataclass(frozen=True)
class Outcome:
    """What became of a question: an answer by a server, or a fault."""

    server: Connection | None = None
    answer: Answer | None = None
    fault: str = "was never asked"


class Asking:
    """Asks each question until it has a possible answer, of whatever server has the fewest in flight.

    Args:
        servers: with what runs there; one that nobody listens at any more is asked no further.
        deadline: of `time.monotonic`.
    """

    def __init__(
        self,
        engine: Engine,
        servers: Mapping[Connection, Instance],
        vocabulary: Vocabulary,
        config: ServerConfig,
        deadline: float,
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._vocabulary = vocabulary
        self._config = config
        self._deadline = deadline
        self._in_flight = dict.fromkeys(servers, 0)  # of the servers that are there
        self._changed = threading.Condition()
        self._over = threading.Event()

    def run(self, questions: Mapping[int, Question]) -> dict[int, Outcome]:
        """What became of each question.

        Raises:
            RolloutError: the deadline is over.
        """
        at_once = min(len(questions), self._config.requests_at_once * len(self._servers))
        threads = ThreadPoolExecutor(at_once, thread_name_prefix="rollout")
        asked = {row: threads.submit(self._ask, question) for row, question in questions.items()}
        try:
            _, late = wait(asked.values(), timeout=self._deadline - time.monotonic() + _SPARE_S)
        finally:
            self._over.set()
            threads.shutdown(wait=False, cancel_futures=True)
        if late or time.monotonic() > self._deadline:
            missing = sum(future in late or future.result().answer is None for future in asked.values())
            raise RolloutError(
                f"{missing} of {len(asked)} responses have not come within rollout.server.time_limit="
                f"{self._config.time_limit:g} s, from {', '.join(server.url for server in self._servers)}"
            )
        return {row: future.result() for row, future in asked.items()}

    def _ask(self, question: Question) -> Outcome:
        outcome = Outcome()
        for pause in pauses(self._config):
            self._over.wait(pause)
            if self._over.is_set() or time.monotonic() > self._deadline:
                break
            with self._least_busy() as server:
                if server is None:
                    return Outcome(fault="no server is left")
                try:
                    return Outcome(server, self._answer(server, question))
                except ServerGone as gone:
                    self._leave_out(server)
                    outcome = Outcome(fault=str(gone))
                except ServerFault as fault:
                    outcome = Outcome(fault=str(fault))
        return outcome

    def _answer(self, server: Connection, question: Question) -> Answer:
        model = self._servers[server].model
        left = max(1.0, self._deadline - time.monotonic())
        body = server.ask(
            "POST",
            PATH,
            self._engine.request(model, question, self._vocabulary),
            time_limit_s=min(self._config.request_time_limit, left),
            most_bytes=question.most_bytes,
        )
        try:
            return read_answer(
                body, question, self._vocabulary, model=model, echoes_prompt=self._engine.echoes_prompt
            )
        except ServerFault as fault:
            raise ServerFault(f"{server.url}: {fault}") from fault

    @contextmanager
    def _least_busy(self) -> Iterator[Connection | None]:
        """A server with room, which is then taken; None where none is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight or self._room())
            server = min(self._in_flight, key=self._in_flight.__getitem__, default=None)
            if server is not None:
                self._in_flight[server] += 1
        try:
            yield server
        finally:
            with self._changed:
                if server in self._in_flight:
                    self._in_flight[server] -= 1
                self._changed.notify_all()

    def _room(self) -> bool:
        return min(self._in_flight.values()) < self._config.requests_at_once

    def _leave_out(self, server: Connection) -> None:
        with self._changed:
            self._in_flight.pop(server, None)
