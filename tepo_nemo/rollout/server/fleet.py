"""The servers together: which weights they have, and answers that are of these weights alone."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tepo_nemo.config.server import ServerConfig
from tepo_nemo.errors import UserError
from tepo_nemo.rollout.protocol import RolloutError
from tepo_nemo.rollout.server.asking import Asking, Outcome
from tepo_nemo.rollout.server.completions import Answer, Question, Vocabulary
from tepo_nemo.rollout.server.connection import Connection, ServerFault, ServerGone
from tepo_nemo.rollout.server.engines import Engine, Instance, engine_of, restart, wait_for
from tepo_nemo.rollout.server.handover import Weights
from tepo_nemo.rollout.server.retries import pauses

LOG = logging.getLogger(__name__)
# So many tokens are never all certain to the last bit of a float.
_ENOUGH_TOKENS = 32


class Fleet:
    """The servers of a configuration.

    A server that cannot be reached, or does not take the weights, is left out and looked for again with the
    next rollout or the next weights. When none is left the run ends.
    """

    def __init__(self, config: ServerConfig, vocabulary: Vocabulary) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._engine: Engine = engine_of(config)
        self._servers = [Connection(url, at_once=config.requests_at_once) for url in config.urls]
        self._weights: Weights | None = None

    def wait(self, check: Callable[[str, Instance], None]) -> None:
        """Wait until all servers are up, and look at each.

        Args:
            check: is given the address and what runs there, and refuses what cannot be worked with.

        Raises:
            UserError: a server does not come up, or is none that can take weights.
        """
        for server in self._servers:
            try:
                wait_for(server, self._config.load_time_limit)
                check(server.url, self._engine.look_at(server))
            except ServerFault as fault:
                raise UserError(
                    f"rollout.server.urls={server.url}: no server that takes weights ({fault}); start it as "
                    "tepo_nemo/rollout/server/README.md says"
                ) from fault

    def push(self, weights: Weights) -> None:
        """Have all servers take over the weights. Raises RolloutError where none does."""
        self._weights = weights
        self._ready()

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of the questions, all of the weights that were pushed last.

        Raises:
            RolloutError: some have not come, in the tries and the time that are allowed.
        """
        deadline = time.monotonic() + self._config.time_limit
        answers: dict[int, Answer] = {}
        for pause in pauses(self._config):
            time.sleep(pause)
            ready = self._ready()
            asking = Asking(self._engine, ready, self._vocabulary, self._config, deadline)
            outcomes = asking.run({row: each for row, each in enumerate(questions) if row not in answers})
            changed = {server for server, before in ready.items() if not self._still(server, before)}
            answers |= {
                row: outcome.answer
                for row, outcome in outcomes.items()
                if outcome.answer is not None and outcome.server not in changed
            }
            if len(answers) == len(questions):
                return _checked([answers[row] for row in range(len(questions))], questions)
            if not changed:  # each question has had its tries
                break
        raise RolloutError(_why(answers, outcomes, changed))

    def sleep(self) -> None:
        """Have servers give their memory away, where that is configured.

        Raises:
            RolloutError: one keeps it.
        """
        for server in self._servers:
            fault = self._put_to_sleep(server)
            if fault is not None:
                raise RolloutError(f"a server keeps its memory: {fault}") from fault

    def _put_to_sleep(self, server: Connection) -> ServerFault | None:
        """Why it keeps its memory; None where it does not."""
        fault: ServerFault | None = None
        for pause in pauses(self._config):
            time.sleep(pause)
            try:
                self._engine.sleep(server)
                return None
            except ServerGone:  # so is its memory
                return None
            except ServerFault as error:
                fault = error
        return fault

    # ----------------------------------------------------------------- weights

    def _ready(self) -> dict[Connection, Instance]:
        """The servers that have the current weights, given to them where they had not."""
        with ThreadPoolExecutor(len(self._servers), thread_name_prefix="weights") as threads:
            found = list(threads.map(self._bring, self._servers))
        ready = {
            server: each
            for server, each in zip(self._servers, found, strict=True)
            if isinstance(each, Instance)
        }
        for each in found:
            if isinstance(each, ServerFault):
                LOG.error("a server is left out: %s", each)
        if not ready:
            raise RolloutError(f"no server has the current weights: {found[0]}")
        return ready

    def _bring(self, server: Connection) -> Instance | ServerFault:
        """What runs there with the current weights, or why there is no such thing."""
        assert self._weights is not None, "no weights were pushed"
        outcome: Instance | ServerFault | None = None
        for pause in pauses(self._config):
            time.sleep(pause)
            try:
                if outcome is not None and self._config.restart_command is not None:
                    LOG.warning("a server is started anew: %s", outcome)
                    restart(server, self._config.restart_command, self._weights, self._config.load_time_limit)
                return self._with_weights(server, self._weights)
            except ServerFault as fault:
                outcome = fault
        assert outcome is not None
        return outcome

    def _with_weights(self, server: Connection, weights: Weights) -> Instance:
        instance = self._engine.look_at(server)
        if instance.version != weights.version:
            self._engine.load(server, weights)
            instance = self._engine.look_at(server)
        if instance.version != weights.version:
            raise ServerFault(
                f"{server.url}: was given weights {weights.version} and says that it has {instance.version}"
            )
        return instance

    def _still(self, server: Connection, before: Instance) -> bool:
        """Whether what runs there is what was there before the questions, with the same weights."""
        try:
            now = self._engine.look_at(server)
        except ServerFault as fault:
            LOG.warning("answers of a server are not used: %s", fault)
            return False
        if now != before:
            LOG.warning("answers of %s are not used: it was started anew or has other weights", server.url)
        return now == before


def _checked(answers: list[Answer], questions: Sequence[Question]) -> list[Answer]:
    sampled = [
        value
        for answer, question in zip(answers, questions, strict=True)
        if question.temperature > 0
        for value in answer.logprobs
    ]
    if len(sampled) >= _ENOUGH_TOKENS and not any(sampled):
        raise RolloutError("log-probs are all 0: nothing could be compared with the trainer's")
    return answers


def _why(answers: dict[int, Answer], outcomes: dict[int, Outcome], changed: set[Connection]) -> str:
    faults = [outcome.fault for outcome in outcomes.values() if outcome.answer is None]
    if faults:
        reason = faults[0]
    else:
        reason = f"{', '.join(server.url for server in changed)} lost the weights again and again"
    missing = sum(row not in answers for row in outcomes)
    return f"{missing} responses have not come: {reason}"
