"""JSON over HTTP with one server: what comes back in time and in one piece, or a fault that says how not."""

import json
from typing import Any, Literal
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, TimeoutError

_CONNECT_S = 10.0
_SMALL_BYTES = 1 << 20  # of an answer that is no generation
_SHOWN_CHARACTERS = 300  # of what a server says to a request that it refuses


class ServerFault(Exception):
    """A request has come to nothing; another may not."""


class ServerGone(ServerFault):
    """Nobody listens at the address."""


class Connection:
    """Requests to one server, by any number of threads at once.

    Args:
        url: `http://HOST:PORT`, with a path in front of all others where a gateway has one.
        at_once: connections that are kept open.
    """

    def __init__(self, url: str, *, at_once: int) -> None:
        self.url = url.rstrip("/")
        self._prefix = urlsplit(self.url).path
        # urllib3 itself and not requests: its pools are made for threads, and it knows of no proxy.
        self._pool = urllib3.connection_from_url(self.url, maxsize=at_once)

    def ask(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: Any = None,
        *,
        time_limit_s: float,
        most_bytes: int = _SMALL_BYTES,
    ) -> Any:
        """The answer, parsed; None where it is empty.

        Args:
            body: sent as JSON; None sends nothing.
            time_limit_s: seconds without a byte of the answer.
            most_bytes: of an answer that is read at all.

        Raises:
            ServerGone: nobody listens.
            ServerFault: no answer in time, none of status 200, none of JSON, or one that is too long.
        """
        try:
            response = self._pool.urlopen(
                method,
                self._prefix + path,
                body=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=time_limit_s),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            content = response.read(most_bytes + 1)
            if response.status == 200 and len(content) <= most_bytes:
                response.release_conn()
            else:
                response.close()  # a server that failed hangs up, and the next request would run into it
        except NewConnectionError as error:
            raise ServerGone(f"{self.url}: nobody listens there") from error
        except TimeoutError as error:
            raise ServerFault(f"{self.url}: no answer to {path} within {time_limit_s:.0f} s") from error
        except HTTPError as error:
            raise ServerFault(f"{self.url}: {path} broke off ({error})") from error
        return self._parsed(path, response.status, content, most_bytes)

    def _parsed(self, path: str, status: int, content: bytes, most_bytes: int) -> Any:
        if status != 200:
            said = " ".join(content[:_SHOWN_CHARACTERS].decode("utf-8", "replace").split())
            raise ServerFault(f"{self.url}: {path} was answered with status {status}: {said}")
        if len(content) > most_bytes:
            raise ServerFault(f"{self.url}: the answer to {path} is longer than {most_bytes} bytes")
        if not content.strip():
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServerFault(f"{self.url}: the answer to {path} is no JSON ({error})") from error
