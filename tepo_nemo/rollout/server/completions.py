"""OpenAI's completions protocol with token ids: what is asked, and what of an answer is believed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tepo_nemo.rollout.server.connection import ServerFault

PATH = "/v1/completions"
_ROUNDING = 1e-4  # by which a log-prob may be above 0


@dataclass(frozen=True)
class Question:
    """One response to be generated. Equal questions to equal weights have equal answers."""

    prompt: Sequence[int]
    max_tokens: int  # the stop token included
    temperature: float  # 0 takes the most likely token
    seed: int  # not negative, of 63 bits

    @property
    def most_bytes(self) -> int:
        """Of an answer: a token takes some 200, with its id, its log-prob and its text in two places."""
        return (1 << 16) + 64 * len(self.prompt) + 1024 * self.max_tokens


@dataclass(frozen=True)
class Answer:
    """A response that was looked at from all sides."""

    tokens: list[int]  # the stop token included; some may be no ids of the vocabulary, if rows pad it
    logprobs: list[float]  # of the tokens, at the temperature of the question (at 1 when greedy)
    finished: bool  # ended by the stop token


@dataclass(frozen=True)
class Vocabulary:
    """Which ids there are."""

    rows: int  # of the embedding: no id of a server is beyond
    stop_token: int  # ends a response, and nothing else does


def base_request(model: str, question: Question, vocabulary: Vocabulary) -> dict[str, Any]:
    """The fields that all servers share."""
    return {
        "model": model,
        "prompt": list(question.prompt),
        "n": 1,
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "seed": question.seed,
        "ignore_eos": True,  # models name other tokens that end a text; only ours ends a response
        "stop_token_ids": [vocabulary.stop_token],
        "stream": False,
    }


def read_answer(
    body: Any, question: Question, vocabulary: Vocabulary, *, model: str, echoes_prompt: bool
) -> Answer:
    """What a server has answered.

    Args:
        body: parsed.
        model: that the answer must name.
        echoes_prompt: the answer repeats the prompt's ids.

    Raises:
        ServerFault: it is not a possible answer to the question.
    """
    try:
        (choice,) = body["choices"]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason, of_model = choice["finish_reason"], body["model"]
        echo = choice["prompt_token_ids"] if echoes_prompt else None
        counted = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise ServerFault(f"an answer lacks what was asked for ({type(error).__name__}: {error})") from error
    _expect(of_model == model, f"an answer is by {of_model!r}, asked was {model!r}")
    _expect(echo is None or echo == list(question.prompt), "an answer is to another prompt")
    _check_tokens(tokens, question, vocabulary, reason)
    _check_logprobs(logprobs, len(tokens))
    _expect(
        counted == (len(question.prompt), len(tokens)),
        f"an answer counts {counted} tokens of prompt and response, they are {len(question.prompt)} and "
        f"{len(tokens)}",
    )
    return Answer(tokens, [float(value) for value in logprobs], tokens[-1] == vocabulary.stop_token)


def _expect(holds: bool, fault: str) -> None:
    if not holds:
        raise ServerFault(fault)


def _check_tokens(tokens: Any, question: Question, vocabulary: Vocabulary, reason: Any) -> None:
    """A response goes to its first stop token, or to its limit."""
    _expect(isinstance(tokens, list) and len(tokens) > 0, "an answer has no tokens")
    _expect(
        len(tokens) <= question.max_tokens,
        f"an answer has {len(tokens)} tokens, {question.max_tokens} were to come at most",
    )
    for token in tokens:
        _expect(
            type(token) is int and 0 <= token < vocabulary.rows,
            f"{token!r} is no token, of which there are {vocabulary.rows}",
        )
    _expect(vocabulary.stop_token not in tokens[:-1], "an answer goes on after the stop token")
    possible = {"stop": tokens[-1] == vocabulary.stop_token, "length": len(tokens) == question.max_tokens}
    _expect(
        isinstance(reason, str) and possible.get(reason, False),
        f"an answer of {len(tokens)} of {question.max_tokens} tokens, the last of them {tokens[-1]}, cannot "
        f"have ended for the reason {reason!r}",
    )


def _check_logprobs(logprobs: Any, count: int) -> None:
    _expect(
        isinstance(logprobs, list) and len(logprobs) == count,
        f"an answer of {count} tokens has no log-prob for each",
    )
    for value in logprobs:
        _expect(
            type(value) in (int, float) and math.isfinite(value) and value <= _ROUNDING,
            f"{value!r} is no log-prob",
        )
