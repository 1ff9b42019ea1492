"""What differs between kinds of servers: the fields of a request, and how weights get there."""

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tepo_nemo.config.server import ServerConfig
from tepo_nemo.errors import UserError
from tepo_nemo.rollout.server.completions import Question, Vocabulary, base_request
from tepo_nemo.rollout.server.connection import Connection, ServerFault
from tepo_nemo.rollout.server.handover import Weights

_SHORT_S = 60.0  # for a question that takes no work
_POLL_S = 0.5


@dataclass(frozen=True)
class Instance:
    """What runs at an address, as it says itself. Answers between two equal ones are of one version."""

    model: str  # its name in requests
    version: str | None  # of the weights; None for those that it was started with
    processes: tuple[str, ...]  # of this start alone
    properties: Mapping[str, Any]  # what it was started with


class Engine(Protocol):
    """A kind of server. All methods but the first raise `ServerFault`."""

    echoes_prompt: bool

    def request(self, model: str, question: Question, vocabulary: Vocabulary) -> dict[str, Any]:
        """The body of a completion."""

    def look_at(self, server: Connection) -> Instance:
        """What runs there."""

    def load(self, server: Connection, weights: Weights) -> None:
        """Have it take over the weights, and forget what it has computed with others."""

    def sleep(self, server: Connection) -> None:
        """Have it give its GPU memory away until the next load."""


def engine_of(config: ServerConfig) -> "Engine":
    """The kind of a configuration."""
    if config.engine == "vllm":
        return VLLM(sleep=config.sleep, load_time_limit_s=config.load_time_limit)
    assert config.restart_command is not None
    return TRTLLMServe(config.restart_command, load_time_limit_s=config.load_time_limit)


class VLLM:
    """vLLM with our extension of its workers, in its development mode."""

    echoes_prompt = True

    def __init__(self, *, sleep: bool, load_time_limit_s: float) -> None:
        self._sleeps = sleep
        self._load_time_limit_s = load_time_limit_s

    def request(self, model: str, question: Question, vocabulary: Vocabulary) -> dict[str, Any]:
        """Every key that shapes the distribution: vLLM takes the rest from `generation_config.json`."""
        return base_request(model, question, vocabulary) | {
            "min_p": 0.0,
            "min_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,  # of the token alone
            "return_token_ids": True,
        }

    def look_at(self, server: Connection) -> Instance:
        workers = self._call(server, "tepo_nemo_status", _SHORT_S)
        versions = {worker.get("version") for worker in workers}
        if len(versions) != 1:
            names = ", ".join(sorted(map(str, versions)))
            raise ServerFault(f"{server.url}: its workers have different weights: {names}")
        return Instance(
            _model_name(server),
            versions.pop(),
            tuple(str(worker.get("instance")) for worker in workers),
            workers[0],
        )

    def load(self, server: Connection, weights: Weights) -> None:
        if self._sleeps:
            server.ask("POST", "/wake_up?tags=weights", time_limit_s=self._load_time_limit_s)
        self._call(server, "tepo_nemo_load_weights", self._load_time_limit_s, folder=str(weights.folder))
        if self._sleeps:
            server.ask("POST", "/wake_up?tags=kv_cache", time_limit_s=self._load_time_limit_s)
        said = server.ask("POST", "/reset_prefix_cache", time_limit_s=_SHORT_S)
        if isinstance(said, dict) and said.get("success") is False:  # older versions say nothing
            raise ServerFault(f"{server.url}: the prefix cache is in use and could not be emptied")
        self._call(server, "tepo_nemo_name_weights", _SHORT_S, version=weights.version)

    def sleep(self, server: Connection) -> None:
        if self._sleeps:  # level 2 keeps no copy of the weights: they come anew
            server.ask("POST", "/sleep?level=2", time_limit_s=self._load_time_limit_s)

    def _call(self, server: Connection, method: str, time_limit_s: float, **arguments: str) -> list[Any]:
        """A method of our extension, in each worker."""
        body = {"method": method, "kwargs": arguments, "timeout": time_limit_s}
        # vLLM gives up first, so that its answer says why.
        said = server.ask("POST", "/collective_rpc", body, time_limit_s=time_limit_s + 5)
        results = said.get("results") if isinstance(said, dict) else None
        if not isinstance(results, list) or not results:
            raise ServerFault(f"{server.url}: {method} was answered without results")
        if method == "tepo_nemo_status" and not all(isinstance(result, dict) for result in results):
            raise ServerFault(f"{server.url}: a worker says no status")
        return results


def check_vllm(
    sequence_length: int, vocabulary: int, *, temperature: float
) -> Callable[[str, Instance], None]:
    """A check of a server before the run, by what it was started with.

    Args:
        sequence_length: of the longest prompt and response together.
        vocabulary: rows of the embedding.
        temperature: of training rollouts.
    """

    def check(url: str, instance: Instance) -> None:
        found = instance.properties
        server = f"rollout.server.urls={url}: the server"
        if found["vocabulary"] != vocabulary:
            raise UserError(
                f"{server} has a model with a vocabulary of {found['vocabulary']}, ours has {vocabulary} "
                "(start it with the same model)"
            )
        if found["max_model_len"] < sequence_length:
            raise UserError(
                f"{server} takes {found['max_model_len']} tokens, model.encoder_seq_length={sequence_length} "
                f"(start it with --max-model-len {sequence_length})"
            )
        if temperature != 1 and found["logprobs_mode"] != "processed_logprobs":
            raise UserError(
                f"{server} tells log-probs at temperature 1, and rollout.temperature={temperature:g} (start "
                "it with --logprobs-mode processed_logprobs)"
            )
        if found["data_parallel_size"] != 1:
            raise UserError(
                f"{server} has {found['data_parallel_size']} copies of the model, and weights would reach "
                "one of them (start one server a copy, and name each)"
            )

    return check


class TRTLLMServe:
    """trtllm-serve. It reads weights when it starts; the name of its folder is that of the model.

    So each answer names the version that it is of.
    """

    echoes_prompt = False

    def __init__(self, restart_command: str, *, load_time_limit_s: float) -> None:
        self._restart_command = restart_command
        self._load_time_limit_s = load_time_limit_s

    def request(self, model: str, question: Question, vocabulary: Vocabulary) -> dict[str, Any]:
        """It refuses fields that it does not know."""
        return base_request(model, question, vocabulary) | {
            "logprobs": 1,  # 0 gives none
            "detokenize": False,  # what else it gives is text
            "include_stop_str_in_output": True,  # or the stop token is cut off
        }

    def look_at(self, server: Connection) -> Instance:
        name = _model_name(server)
        return Instance(name, name, (), {})

    def load(self, server: Connection, weights: Weights) -> None:
        restart(server, self._restart_command, weights, self._load_time_limit_s)

    def sleep(self, server: Connection) -> None:
        """It cannot; a configuration that asks for it is refused."""


def restart(server: Connection, command: str, weights: Weights, time_limit_s: float) -> None:
    """Have a command start the server anew, and wait until it answers.

    The command finds `TEPO_NEMO_SERVER_URL`, `TEPO_NEMO_WEIGHTS` (a folder of Hugging Face) and
    `TEPO_NEMO_WEIGHTS_VERSION` in its environment, ends what may still run there, and returns once the new
    server is started; it need not wait until that answers.
    """
    variables = {
        "TEPO_NEMO_SERVER_URL": server.url,
        "TEPO_NEMO_WEIGHTS": str(weights.folder),
        "TEPO_NEMO_WEIGHTS_VERSION": weights.version,
    }
    started = time.monotonic()
    try:
        ended = subprocess.run(
            shlex.split(command), env=os.environ | variables, stdin=subprocess.DEVNULL, timeout=time_limit_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerFault(f"{server.url}: rollout.server.restart_command failed ({error})") from error
    if ended.returncode != 0:
        raise ServerFault(
            f"{server.url}: rollout.server.restart_command ended with exit code {ended.returncode}"
        )
    wait_for(server, time_limit_s - (time.monotonic() - started))


def wait_for(server: Connection, time_limit_s: float) -> None:
    """Return when the server answers. Raises ServerFault if it does not in time."""
    end = time.monotonic() + time_limit_s
    while True:
        try:
            server.ask("GET", "/health", time_limit_s=_SHORT_S)
            return
        except ServerFault as fault:
            if time.monotonic() > end:
                raise ServerFault(f"{fault}, and so for {time_limit_s:.0f} s") from fault
        time.sleep(_POLL_S)


def _model_name(server: Connection) -> str:
    said = server.ask("GET", "/v1/models", time_limit_s=_SHORT_S)
    try:
        return str(said["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServerFault(f"{server.url}: /v1/models names no model") from error
