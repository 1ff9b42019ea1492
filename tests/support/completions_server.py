"""A server as vLLM's, with a `PlainLlama` behind it: real HTTP, real weights, and faults on demand.

    python completions_server.py vllm FOLDER PORT

serves the weights of a folder of Hugging Face. It takes new ones through the very extension that vLLM's
workers get, has a prefix cache that goes stale where nobody empties it, and loses its weights when it sleeps.
`POST /faults {"kind": times}` plans faults; `GET /seen` tells what was asked of it. As `trtllm` it is what
trtllm-serve is to a client: named by its folder, strict about fields, and without any way to change weights.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from support.plain_llama import PlainLlama

from tepo_nemo.rollout.server.vllm_extension import WorkerExtension, _tensors

ASLEEP = "asleep"
# What trtllm-serve's completions take; it refuses other fields.
TRTLLM_FIELDS = {
    "model", "prompt", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logprobs", "detokenize",
    "add_special_tokens", "echo", "stream",
}  # fmt: skip


class Worker(WorkerExtension):
    """What vLLM's worker has that the extension uses."""

    def __init__(self, model: PlainLlama, longest: int) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        model_config = SimpleNamespace(
            logprobs_mode="processed_logprobs",
            max_model_len=longest,
            get_vocab_size=lambda: model.vocabulary,
        )
        self.vllm_config = SimpleNamespace(
            model_config=model_config, parallel_config=SimpleNamespace(data_parallel_size=1)
        )


class State:
    """All that requests share."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.folder = folder
        self.name = str(folder) if kind == "vllm" else folder.name
        self.model = PlainLlama(folder)
        self.model.load_weights(_tensors(folder))
        self.worker = Worker(self.model, longest=64)
        self.prefix_cache: dict[tuple[int, ...], torch.Tensor] = {}
        self.asleep: set[str] = set()
        self.faults: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.in_flight = 0
        self.deaf = False
        self.order: list[str] = []  # of control requests
        self.lock = threading.RLock()

    def fault(self, *kinds: str) -> str | None:
        """The next fault of these kinds that is planned."""
        with self.lock:
            for kind in kinds:
                if self.faults[kind] > 0:
                    self.faults[kind] -= 1
                    return kind
        return None

    # ----------------------------------------------------------------- control

    def call(self, method: str, arguments: dict[str, str]) -> Any:
        """A method of the extension, in the only worker."""
        if method == "tepo_nemo_load_weights" and self.fault("lies"):
            return None  # and will tell the new version
        if method == "tepo_nemo_load_weights" and self.fault("stale"):
            self.deaf = True  # keeps weights and version, and says that all is well
            return None
        if method == "tepo_nemo_name_weights" and self.deaf:
            self.deaf = False
            return None
        return getattr(self.worker, method)(**arguments)

    def sleep(self) -> None:
        self.asleep = {"weights", "kv_cache"}
        for parameter in self.model.parameters():
            parameter.fill_(float("nan"))

    def wake(self, tags: list[str]) -> None:
        self.asleep -= set(tags)

    # ----------------------------------------------------------------- generation

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert not self.asleep, ASLEEP
        prompt, limit, stops = body["prompt"], body["max_tokens"], body["stop_token_ids"]
        random = torch.Generator().manual_seed(body["seed"])
        tokens, logprobs = [], []
        while len(tokens) < limit and not (tokens and tokens[-1] in stops):
            scaled = self._logits((*prompt, *tokens), cached=not tokens) / (body["temperature"] or 1.0)
            logs = scaled.log_softmax(dim=0)
            drawn = (
                logs.argmax()
                if not body["temperature"]
                else torch.multinomial(logs.exp(), 1, generator=random)
            )
            tokens.append(int(drawn))
            logprobs.append(float(logs[tokens[-1]]))
        choice = {
            "index": 0,
            "text": "",
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": "stop" if tokens[-1] in stops else "length",
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        if self.kind == "trtllm":
            _as_trtllm(choice, body)
        return {"model": self.name, "choices": [choice], "usage": usage}

    def _logits(self, tokens: tuple[int, ...], cached: bool) -> torch.Tensor:
        """Those after a prompt are kept until the prefix cache is emptied."""
        if not cached:
            return self.model.logits(torch.tensor(tokens))
        with self.lock:
            if tokens not in self.prefix_cache:
                self.prefix_cache[tokens] = self.model.logits(torch.tensor(tokens))
            return self.prefix_cache[tokens]


def _as_trtllm(choice: dict[str, Any], body: dict[str, Any]) -> None:
    unknown = body.keys() - TRTLLM_FIELDS
    assert not unknown, f"extra fields not permitted: {unknown}"
    del choice["prompt_token_ids"]
    if body.get("detokenize", True):
        choice["token_ids"] = None
    elif choice["finish_reason"] == "stop" and not body.get("include_stop_str_in_output"):
        choice["token_ids"].pop()
    if not body.get("logprobs"):
        choice["logprobs"] = None


def spoil(answer: dict[str, Any], kind: str, vocabulary: int) -> None:
    """Make an answer one that cannot be."""
    (choice,) = answer["choices"]
    tokens, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    match kind:
        case "no logprobs":
            choice["logprobs"] = None
        case "few logprobs":
            values.pop()
        case "no number":
            values[0] = float("nan")
        case "above zero":
            values[0] = 0.5
        case "unknown id":
            tokens[0] = vocabulary
        case "negative id":
            tokens[0] = -1
        case "no id":
            tokens[0] = "4"
        case "truth value":
            tokens[0] = True
        case "too long":
            tokens += tokens[:1] * 64
            values += values[:1] * 64
        case "empty":
            tokens.clear()
            values.clear()
        case "goes on":
            tokens.insert(0, tokens[-1])
            values.insert(0, values[-1])
        case "wrong reason":
            choice["finish_reason"] = "abort"
        case "other prompt":
            choice["prompt_token_ids"] = choice["prompt_token_ids"][::-1] + [4]
        case "other model":
            answer["model"] = "another"
        case "two answers":
            answer["choices"] *= 2
        case "wrong count":
            answer["usage"]["completion_tokens"] += 1
        case "no choices":
            del answer["choices"]


SPOILT = (
    "no logprobs", "few logprobs", "no number", "above zero", "unknown id", "negative id", "no id",
    "truth value", "too long", "empty", "wrong reason", "other prompt", "other model", "two answers",
    "wrong count", "no choices",
)  # fmt: skip
BROKEN = ("no json", "half", "endless", "error", "hangs")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/health":
                self.answer({})
            case "/v1/models":
                self.answer({"data": [{"id": self.state.name}]})
            case "/seen":
                self.answer({"counts": self.state.seen, "order": self.state.order})

    def do_POST(self) -> None:
        state, parts = self.state, urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(content) if content else None
        try:
            match parts.path:
                case "/v1/completions":
                    self.complete(body)
                case "/collective_rpc" | "/reset_prefix_cache" if state.kind == "trtllm":
                    self.answer({"detail": "Not Found"}, status=404)
                case "/collective_rpc":
                    with state.lock:
                        result = state.call(body["method"], body["kwargs"])
                        if body["method"] != "tepo_nemo_status":
                            state.order.append(body["method"].split("_")[2])
                    self.answer({"results": [result]})
                case "/reset_prefix_cache":
                    busy = bool(state.fault("busy cache"))
                    if not busy:
                        state.prefix_cache.clear()
                    state.order.append("reset")
                    self.answer({"success": not busy})
                case "/sleep":
                    state.order.append("sleep")
                    state.sleep()
                    self.answer({})
                case "/wake_up":
                    tags = parse_qs(parts.query)["tags"]
                    state.order += [f"wake {tag}" for tag in tags]
                    state.wake(tags)
                    self.answer({})
                case "/faults":
                    state.faults.update(body)
                    self.answer({})
        except (BrokenPipeError, ConnectionResetError):
            pass  # nobody waits any more
        except Exception as error:  # what vLLM's server does with an error of a worker
            self.close_connection = True
            self.answer({"error": {"message": f"{type(error).__name__}: {error}"}}, status=500)

    def complete(self, body: dict[str, Any]) -> None:
        state = self.state
        with state.lock:
            state.in_flight += 1
            state.seen["completions"] += 1
            state.seen["at once"] = max(state.seen["at once"], state.in_flight)
        try:
            kind = state.fault(*BROKEN, *SPOILT, "dies", "forgets", "slow")
            if kind == "dies":
                os._exit(1)
            if kind == "slow":
                time.sleep(0.3)
            if kind == "forgets":  # as one that was started anew by somebody else
                fresh = State(state.folder, state.kind)
                state.model, state.worker = fresh.model, fresh.worker
                state.prefix_cache.clear()
            if kind in BROKEN:
                self.break_off(kind)
                return
            answer = state.complete(body)
            if kind in SPOILT:
                spoil(answer, kind, state.model.vocabulary)
            self.answer(answer)
        finally:
            with state.lock:
                state.in_flight -= 1

    def break_off(self, kind: str) -> None:
        match kind:
            case "error":
                self.answer({"error": "no"}, status=503)
            case "no json":
                self.answer(None, raw=b"<html>Bad Gateway</html>")
            case "half":
                self.close_connection = True
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"model": "x", "choi')
            case "endless":
                self.close_connection = True
                self.send_response(200)
                self.end_headers()
                for _ in range(400):
                    self.wfile.write(b"[" * 65536)
            case "hangs":
                time.sleep(30)

    def answer(self, value: Any, status: int = 200, raw: bytes | None = None) -> None:
        content = json.dumps(value).encode() if raw is None else raw
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def make_server(kind: str, folder: Path, port: int) -> Server:
    """A server on a loopback port; 0 takes a free one."""
    torch.set_num_threads(1)
    handler = type("Bound", (Handler,), {"state": State(folder, kind)})
    return Server(("127.0.0.1", port), handler)


if __name__ == "__main__":
    make_server(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])).serve_forever()
