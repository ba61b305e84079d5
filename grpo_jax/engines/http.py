"""JSON over HTTP, and which failures may pass by themselves."""

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

# A key that the server asks for.
KEY = "ENGINE_API_KEY"

_PASSING = {408, 425, 429}
_SERVERS_FAULT = 500
_LONGEST_MESSAGE = 300

# Not by a proxy, whatever the environment says: an engine is on the network of the trainer.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Gone(Exception):
    """There is no answer now, but there may be one later."""


class Refused(Exception):
    """The server answers, and refuses; asking again would not help.

    Attributes:
      code: the status; 0 where the address is none.
    """

    def __init__(self, words: str, code: int = 0) -> None:
        super().__init__(words)
        self.code = code


def ask(url: str, body: Any = None, *, timeout: float) -> bytes:
    """Asks a server and returns its answer.

    Args:
      url: of the resource.
      body: sent as JSON by POST; None: the resource is read by GET.
      timeout: seconds without a byte.

    Raises:
      Gone: it does not answer, or says that it cannot now.
      Refused: it says that it does not know such a request.
    """
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        if key := os.environ.get(KEY):
            request.add_unredirected_header("Authorization", f"Bearer {key}")  # a redirect may lead to another server
        with _OPENER.open(request, timeout=timeout) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        message = f"{error.code} {error.reason}: {_message(error)}"
        if error.code in _PASSING or error.code >= _SERVERS_FAULT:
            raise Gone(message) from None
        raise Refused(message, error.code) from None
    except TimeoutError:
        raise Gone(f"nothing came for {timeout:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise Gone(_one_line(getattr(error, "reason", "") or error)) from None
    except ValueError as error:
        raise Refused(f"{url} is no address, such as http://host:8000 ({_one_line(error)})") from None


def _message(error: urllib.error.HTTPError) -> str:
    """Returns a server's words about an error: the message of its JSON, or the beginning of its page."""
    try:
        text = error.read(2**16).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    try:
        document = json.loads(text)
        error = document.get("error", document)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return _one_line(text)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:_LONGEST_MESSAGE]
