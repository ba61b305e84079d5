"""Requests to a server over HTTP. Each has one deadline, and an error tells if it is worth repeating."""

import http.client
import io
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

# The environment variable with the server's key.
KEY = "ENGINE_API_KEY"

_PASSING = {408, 425, 429}
_REDIRECTS, _SERVERS_FAULT = 300, 500
_LONGEST_MESSAGE = 300
_LONGEST_ANSWER = 2**25  # bytes; a token takes about a hundred
_LONGEST_ERROR = 2**16
_SCHEMES: Mapping[str, Any] = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class Failure(Exception):
    """A failed request.

    Attributes:
      code: The HTTP status; 0 if there is none.
    """

    def __init__(self, words: str, code: int = 0) -> None:
        super().__init__(words)
        self.code = code


class Gone(Failure):
    """The server does not answer now, but may answer later."""


class Refused(Failure):
    """The server refuses a request, so that repeating it would not help."""


Connections = WeakSet[http.client.HTTPConnection]  # those of requests; one whose answer is there has no socket


def ask(url: str, body: Any = None, *, timeout: float, waiting: Connections | None = None) -> bytes:
    """Sends a request to a server and returns the answer. Redirects are not followed.

    Args:
      url: The address of the resource.
      body: The body to POST as JSON. None: a GET request.
      timeout: Seconds until the whole answer must be there.
      waiting: Receives the connection, so that `cut` can break it. Default: a set that nobody reads.

    Raises:
      Gone: The server does not answer in time, or answers that it cannot now.
      Refused: The server rejects the request or answers endlessly, or the address or the key is invalid.
    """
    data, ends, key = None if body is None else json.dumps(body).encode(), time.monotonic() + timeout, _key()
    if not (key.isascii() and key.isprintable()):
        raise Refused(f"{KEY} holds a line break or another character that no key has: set it again")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError("it names no host")
        with closing(_SCHEMES[parts.scheme](parts.hostname, parts.port, timeout=timeout)) as connection:
            connection.response_class = partial(_Answer, ends=ends)
            target = parts._replace(scheme="", netloc="").geturl() or "/"
            (WeakSet() if waiting is None else waiting).add(connection)
            connection.request("GET" if data is None else "POST", target, data, headers)
            with connection.getresponse() as answer:
                return _read(answer)
    except TimeoutError:
        raise Gone(f"no answer came within {timeout:g} s") from None
    except (ValueError, LookupError, http.client.InvalidURL) as error:
        raise Refused(f"its address is not like http://host:8000 ({without_key(error)})") from None
    except (OSError, http.client.HTTPException) as error:
        raise Gone(without_key(error)) from None


def cut(waiting: Connections) -> None:
    """Breaks connections, so that their requests raise `Gone` at once. A server then stops to work on them."""
    for connection in tuple(waiting):
        if (connected := connection.sock) is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def decode_answer(answer: bytes) -> Any:
    """Parses an answer.

    Raises:
      ValueError: It is no JSON, or too deep.
    """
    try:
        return json.loads(answer)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def without_key(text: object) -> str:
    """Returns a text in one line, shortened and without the key, which a server may repeat."""
    line, key = " ".join(str(text).split()), _key()
    return (line.replace(key, "***") if key else line)[:_LONGEST_MESSAGE]


def _read(answer: http.client.HTTPResponse) -> bytes:
    """Reads the body of an answer, and raises if it reports a failure or is too long."""
    if answer.status >= _REDIRECTS:
        reason = b""
        with suppress(OSError, http.client.HTTPException):
            reason = _read_up_to(answer, _LONGEST_ERROR)
        message = without_key(f"{answer.status} {answer.reason}: {reason.decode(errors='replace')}")
        is_passing = answer.status in _PASSING or answer.status >= _SERVERS_FAULT
        raise (Gone if is_passing else Refused)(message, answer.status)
    data = _read_up_to(answer, _LONGEST_ANSWER)
    if len(data) > _LONGEST_ANSWER:
        raise Refused(f"its answer has more than {_LONGEST_ANSWER} bytes")
    if answer.length:  # read1 does not notice that a connection broke
        raise http.client.IncompleteRead(data, answer.length)
    return data


def _read_up_to(answer: http.client.HTTPResponse, most: int) -> bytes:
    """Reads the body of an answer, of which only the beginning if it exceeds `most` bytes."""
    data = bytearray()
    while len(data) <= most and (block := answer.read1(2**16)):
        data += block
    return bytes(data)


class _Answer(http.client.HTTPResponse):
    """An answer of which nothing is read after a deadline, neither headers nor body."""

    def __init__(self, connected: socket.socket, *args: Any, ends: float, **options: Any) -> None:
        super().__init__(connected, *args, **options)
        self.fp = io.BufferedReader(_Until(self.fp, connected, ends))


class _Until(io.RawIOBase):
    """The stream of a socket, which raises TimeoutError after the time `ends`."""

    def __init__(self, stream: io.BufferedReader, connected: socket.socket, ends: float) -> None:
        self._stream, self._socket, self._ends = stream, connected, ends

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(max(self._ends - time.monotonic(), 1e-3))
        return self._stream.readinto1(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _key() -> str:
    """Returns the server's key, or "" without one."""
    return os.environ.get(KEY, "").strip()
