"""An HTTP server on asyncio that answers JSON with JSON, on a port of this machine that only this machine reaches."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from grpo_jax.errors import reason_of

_LONGEST_HEAD, _LONGEST_BODY = 2**16, 2**22  # bytes
_LINGERS = 5  # seconds in which the rest of a refused request is read

# (method, path, body) -> HTTP status and the answer; may raise BadRequest
Answer = Callable[[str, str, bytes], Awaitable[tuple[int, Any]]]


class BadRequest(Exception):
    """A request that is refused.

    Attributes:
      status: The HTTP status of the answer.
      body: The answer, as OpenAI's API writes errors.
    """

    def __init__(self, sentence: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(sentence)
        kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        self.status = status
        self.body = {"error": {"message": sentence, "type": kind, "param": param, "code": None}}


async def start_server(answer: Answer) -> tuple[asyncio.Server, int]:
    """Starts a server, and returns it with its port.

    Args:
      answer: Answers requests, several at a time.
    """
    server = await asyncio.start_server(partial(_converse, answer), "127.0.0.1", limit=_LONGEST_HEAD)
    return server, server.sockets[0].getsockname()[1]


async def _converse(answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the requests of a connection, one after the other, until one cannot be read."""
    with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):  # the client has gone
        is_open = True
        while is_open:
            is_open = False
            try:
                method, path, body, is_open = await _read(reader, writer)
                status, content = await answer(method, path, body)
            except BadRequest as error:
                status, content = error.status, error.body
            except (ConnectionError, asyncio.IncompleteReadError):
                raise
            except Exception as error:
                status, content = 500, BadRequest(f"{type(error).__name__}: {reason_of(error)}", status=500).body
            _write(writer, status, content, is_open)
            await writer.drain()
        async with asyncio.timeout(_LINGERS):  # a client that still sends would not read the answer
            while await reader.read(_LONGEST_HEAD):
                pass
    writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, str, bytes, bool]:
    """Returns the method, the path and the body of a request, and whether the connection then stays open."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise BadRequest(f"the headers have more than {_LONGEST_HEAD} bytes", status=431) from None
    first, *lines = head.split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    match first.split(" "):
        case [method, path, version] if version in ("HTTP/1.0", "HTTP/1.1"):
            pass
        case _:
            raise BadRequest("this is no request of HTTP/1.1", status=400)
    length = fields.get("content-length", "0")
    if "transfer-encoding" in fields or not (length.isascii() and length.isdigit()):
        raise BadRequest("the body needs its length in Content-Length", status=411)
    if len(length) > len(str(_LONGEST_BODY)) or int(length) > _LONGEST_BODY:
        raise BadRequest(f"the body has more than {_LONGEST_BODY} bytes", status=413)
    if fields.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(length))
    is_open = version == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
    return method, path.partition("?")[0], body, is_open


def _write(writer: asyncio.StreamWriter, status: int, content: Any, is_open: bool) -> None:
    data = json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}", f"Connection: {'keep-alive' if is_open else 'close'}"]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
