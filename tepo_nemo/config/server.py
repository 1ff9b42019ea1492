"""The section of `rollout` for servers that generate, and what it must agree on with the others."""

from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from tepo_nemo.config.base import Count, LocalPath, Positive, Section
from tepo_nemo.config.messages import shown
from tepo_nemo.errors import UserError

if TYPE_CHECKING:
    from tepo_nemo.config.schema import Config


class ServerConfig(Section):
    """The servers of rollout.backend=server; tepo_nemo/rollout/server/README.md says how to start them."""

    urls: list[str] = []
    """Such as [http://127.0.0.1:8000]; each has the whole model, and gets its share of the requests."""
    engine: Literal["vllm", "trtllm_serve"] = "vllm"
    """How they take weights: vllm in place, through our extension; trtllm_serve by being started anew."""
    handover_folder: LocalPath | None = None
    """Where the weights are handed over, under one path for all machines; null is the run's handover/."""
    restart_command: str | None = None
    """Starts a server anew. Required with trtllm_serve; with vllm it revives a server that is gone."""
    sleep: bool = False
    """Servers give their GPU memory to training between rollouts; only vllm can, with --enable-sleep-mode."""
    requests_at_once: Count = 256
    """Requests in flight at each server."""
    attempts: Count = 4
    """Tries of anything that is asked of servers; then the run ends."""
    backoff: Positive = 1.0
    """Seconds before the second try; twice as many before each further one, up to 60."""
    request_time_limit: Positive = 1800.0
    """Seconds without a word about one response before it is asked for again."""
    time_limit: Positive = 7200.0
    """Seconds that all responses of a request may take together before the run ends."""
    load_time_limit: Positive = 1800.0
    """Seconds that a server may take to start, or to load weights."""


def check_server(config: "Config") -> None:
    """Raises UserError on the first mistake."""
    server = config.rollout.server
    if config.rollout.backend != "server":
        for key, field in ServerConfig.model_fields.items():
            if (value := getattr(server, key)) != field.default:
                raise UserError(
                    f"rollout.server.{key}={shown(value)}: has no effect with "
                    f"rollout.backend={config.rollout.backend} (remove it, or set rollout=server)"
                )
        return
    _check_urls(server.urls)
    if server.engine == "trtllm_serve":
        _check_trtllm_serve(config)


def _check_urls(urls: list[str]) -> None:
    if not urls:
        raise UserError(
            "rollout.server.urls=[]: rollout.backend=server needs a server (set "
            "rollout.server.urls=[http://127.0.0.1:8000], or rollout=megatron)"
        )
    for url in urls:
        if not _is_url(url):
            raise UserError(
                f"rollout.server.urls={shown(url)}: is no address of a server (write http://HOST:PORT)"
            )
    for number, url in enumerate(urls):
        if url.rstrip("/") in [other.rstrip("/") for other in urls[:number]]:
            raise UserError(f"rollout.server.urls={shown(url)}: is named twice (give each server once)")


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and parts.port != 0
        )
    except ValueError:  # of a port that is no number
        return False


def _check_trtllm_serve(config: "Config") -> None:
    server = config.rollout.server
    if server.restart_command is None:
        raise UserError(
            "rollout.server.restart_command=null: trtllm-serve reads weights when it is started and takes no "
            "others, so that rollout.server.engine=trtllm_serve needs a command that starts it anew (set it, "
            "or rollout.server.engine=vllm)"
        )
    if server.sleep:
        raise UserError(
            "rollout.server.sleep=true: trtllm-serve cannot give its memory away (set "
            "rollout.server.sleep=false)"
        )
    if config.rollout.temperature != 1:
        raise UserError(
            f"rollout.temperature={config.rollout.temperature}: trtllm-serve tells log-probs at temperature "
            "1, whatever it samples at (set rollout.temperature=1, or rollout.server.engine=vllm)"
        )
