"""Short texts for object stores' errors, with the store's own names.

obstore puts the whole response into the text of its error. S3, GCS and Azure name the
error in a ``<Code>``; a file system gives neither a status nor a code.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import urljoin, urlsplit

from kvwire.errors import printable
from kvwire.limits import REASON_CHARS_MAX

_CODE: Final = re.compile(r"<Code>\s*(\w{1,64})\s*</Code>")
_MESSAGE: Final = re.compile(r"<Message>\s*(.{1,1000}?)\s*</Message>", re.DOTALL)
_STATUS: Final = re.compile(r"status code: (\d{3}[\w -]*)")
# The request and its retries, which are removed; the tier's name already has the host.
_REQUEST: Final = re.compile(r"^.*Error performing .{1,2000}? - (?=\w)")
_CAUSE: Final = re.compile(r'(?:message|error): "([^"]{1,200})"')
NO_PROXY_AT: Final = "127.0.0.1:0"
"""A proxy that nobody can be, for requests that must not be sent."""

# Names in obstore's text for failures without a message.
_CAUSES: Final[Mapping[str, str]] = {
    f"{NO_PROXY_AT},": (
        "it redirects to another host, and kvwire uses only the host that you named"
    ),
    "InvalidCertificate(": "its certificate is not trusted here",
    "InvalidContentType": "it has no TLS there; write endpoint=http://",
}
_HOST: Final = re.compile(r"Error performing \w+ (\w+://[^/\s]+)")
# Details for debugging that obstore appends to its text.
_DEBUG: Final = "\n\nDebug source:"
# The codes for one missing object. Any other 404 is about a bucket, a container or a
# path that does not lead to an object store.
_NO_OBJECT: Final = frozenset({"NoSuchKey", "BlobNotFound"})
_KEYS: Final = "the credentials in this process's environment"
_REMEDIES: Final[Mapping[str, str]] = {
    "AccessDenied": "allow to get, put, delete and list there",
    "AuthorizationHeaderMalformed": "give the bucket's own ?region=",
    "ContainerNotFound": "make it first",
    "ExpiredToken": f"renew {_KEYS}, and start it again",
    "InvalidAccessKeyId": f"see {_KEYS}",
    "NoSuchBucket": "make it first, kvwire does not",
    "PermanentRedirect": "give the bucket's own ?region= and ?endpoint=",
    "RequestTimeTooSkewed": "set this machine's clock",
    "SignatureDoesNotMatch": f"see {_KEYS}",
}
_REDIRECTS: Final = (
    HTTPStatus.MOVED_PERMANENTLY,
    HTTPStatus.FOUND,
    HTTPStatus.SEE_OTHER,
    HTTPStatus.TEMPORARY_REDIRECT,
    HTTPStatus.PERMANENT_REDIRECT,
)


def is_no_object(error: BaseException) -> bool:
    """Return whether an error only means that one object is absent.

    If the bucket is missing, every object is absent too; taking that for an empty
    bucket would hide the failure for ever.
    """
    if not isinstance(error, FileNotFoundError):
        return False
    text = str(error)
    code = _CODE.search(text)
    return code[1] in _NO_OBJECT if code else _STATUS.search(text) is None


def is_past_the_end(error: BaseException) -> bool:
    """Return whether an error means that a range begins after the end of an object."""
    text = str(error)
    status = _STATUS.search(text)
    return status[1].startswith("416") if status else "StartTooLarge" in text


def is_named(error: BaseException) -> bool:
    """Return whether the error has a name from the store."""
    return _CODE.search(str(error)) is not None


def words_of(error: BaseException) -> str:
    """Return an error's short text: the store's name for it, and the remedy."""
    text = str(error).partition(_DEBUG)[0]
    code = _CODE.search(text)
    status = _STATUS.search(text)
    if code is not None:
        message = _MESSAGE.search(text)
        answer = code[1] + (f": {html.unescape(message[1])}" if message else "")
        remedy = _REMEDIES.get(code[1], "")
        room = REASON_CHARS_MAX - len(remedy) - 2
        answer = printable(answer[:room]) if answer[:room].isprintable() else code[1]
        return f"{answer.rstrip('.')}; {remedy}" if remedy else answer
    if status is not None:
        host = _HOST.search(text)
        who = host[1] if host else "it"
        return printable(f"{who} answers {status[1].strip()}, without a reason")
    first = _REQUEST.sub("", text.partition("\n")[0])
    causes = [words for name, words in _CAUSES.items() if name in str(error)]
    causes = causes or _CAUSE.findall(str(error))
    if causes and causes[-1] not in first:
        first += f": {causes[-1]}"
    return printable(first[:REASON_CHARS_MAX])


def sent_elsewhere(url: str, timeout_s: float) -> str:
    """Return the other host to which a server redirects, or "".

    obstore follows every redirect, and sends the blocks along. So this function asks
    first, without credentials, and does not follow. It runs on a thread.
    """
    here = urlsplit(url)
    kind = HTTPSConnection if here.scheme == "https" else HTTPConnection
    try:
        with closing(kind(here.netloc, timeout=timeout_s)) as asking:
            asking.request("HEAD", here.path or "/")
            answer = asking.getresponse()
            where = urljoin(url, answer.getheader("Location") or "")
    except (OSError, HTTPException, ValueError):
        return ""  # a server that does not answer now is checked again by real requests
    there = urlsplit(where)
    if answer.status not in _REDIRECTS or here[:2] == there[:2]:
        return ""
    return printable(f"{there.scheme}://{there.netloc}")
