"""What cannot be passed on as it is, of clients and of engines."""

from __future__ import annotations

import json

import pytest

from packages.vllm.tests.support.proxies import (
    ASK,
    PATH,
    Engines,
    app,
    call,
    fails,
    post,
    says,
)


@pytest.mark.parametrize("value", ["a\x01b", "\x7f"])
async def test_a_header_that_engines_cannot_be_sent(value: str) -> None:
    """It is the client's mistake, and no engine is taken for dead."""
    engines = Engines()
    application = app(engines)
    said = await post(application, headers={"x-request-id": value})
    assert said.status_code == 400
    assert "header" in said.json()["error"]["message"]
    assert not engines.asked
    assert (await call(application, "GET", "/health")).status_code == 200


async def test_a_header_of_an_engine_that_is_not_latin() -> None:
    """What is no UTF-8 of it is replaced, and its request is over then."""
    headers = {"content-type": "text/plain", "x-request-id": "€\udcff"}
    odd = says(b"{}", headers=headers)
    application = app(Engines(d1=odd, d2=odd))
    said = await post(application)
    assert dict(said.headers.raw)[b"x-request-id"] == "€\ufffd".encode()
    assert (await call(application, "GET", "/fleet")).json()["requests"] == []


async def test_an_error_text_that_clients_cannot_be_sent() -> None:
    odd = fails(500, "\ud800")
    said = await post(app(Engines(d1=odd, d2=odd)))
    assert said.status_code == 500
    assert "ud800" in json.loads(said.content)["error"]["message"]


async def test_a_header_of_a_client_that_is_not_latin() -> None:
    """Engines hear the bytes that the client has sent."""
    engines = Engines()
    sent = {b"x-request-id": "é€".encode()}
    said = await call(app(engines), "POST", PATH, json=ASK, headers=sent)
    assert said.status_code == 200
    assert engines.headers["d1"]["x-request-id"] == "é€"


async def test_a_header_of_an_engine_that_servers_do_not_send() -> None:
    odd = {"content-type": "application/json", "x-request-id": "a\x01b"}
    said = await post(app(Engines(d1=says(b"{}", headers=odd))))
    assert said.status_code == 200
    assert "x-request-id" not in said.headers
