"""Wrong configurations, addresses, keys and certificates, and who is no kvwire."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import kvwire
from kvwire import (
    AuthenticationFailed,
    BackendUnavailable,
    ConnectError,
    ConnectionLost,
    HandshakeError,
    HandshakeTimeout,
    ListenError,
    ProfileMismatch,
    UsageError,
)
from tests.support.wrong_uses import steps
from tests.support.wrong_uses.things import ME, WrongUse

# Wrong types are refused by type checkers as well, which are not asked here.
untyped: Any = kvwire


def _key(key: str, value: Any, words: str) -> WrongUse:
    """Make a row of one key; what begins with a colon follows its name and value."""
    said = f"arguments: {key}={value!r}{words}" if words[0] == ":" else words
    name = f"`open({key}={value!r})`"
    return WrongUse(name, lambda t: t.opened(**{key: value}), UsageError, said)


CONFIG: Final = [
    _key("lane", 4, "did you mean 'lanes'?"),
    _key("trust", "pks", ": Invalid enum value 'pks'; did you"),
    _key("trust", "psk", 'config: trust="psk" needs psk_file; `kvwire keygen FILE`'),
    _key("trust", "mtls", 'config: trust="mtls" needs tls_cert_file, tls_key_file'),
    _key("psk_file", "x", 'config: a psk_file is given, so trust must be "psk"'),
    _key("tls_peers", ["*"], 'config: tls_peers is given, so trust must be "mtls"'),
    _key("checksum", "sample", ": Invalid enum value 'sample'"),
    _key("checksum", True, ": Expected `str`, got `bool`; known"),
    _key("lanes", 0, ": Expected `int` >= 1"),
    _key("lanes", "many", ": Expected `int`, got `str`"),
    _key("lanes", 1.5, ": Expected `int`, got `float`"),
    _key("chunk_bytes", 1, ": Expected `int` >= 65536"),
    _key("chunk_bytes", "4 apples", ": write a number and B, KiB"),
    _key(
        "window_bytes", "1TiB", "arguments: window_bytes=1099511627776: Expected `int`"
    ),
    _key("lease_s", -1, ": Expected `float` > 0.0"),
    _key("lease_s", "soon", ": Expected `float`, got `str`"),
    _key("restart_grace_s", 0, ": Expected `float` > 0.0"),
    _key("ping_misses", 1, ": Expected `int` >= 2"),
    _key("resume", "maybe", ": write true or false"),
    _key("directory", "reddis://host", "no directory of the kind 'reddis'; there is"),
    _key("prefer", "tcp", ": a list is needed, such as ['tcp']"),
    _key("prefer", ["rdma"], "no installed package offers a transport 'rdma'; known"),
    _key("require", ["locl"], "no installed package offers a transport 'locl'; did"),
    _key("forbid", ["locl"], "no installed package offers a transport 'locl'; did"),
    _key("forbid", [1], ": Expected `str`, got `int`"),
    _key("backends", {"lcal": {}}, "backends: no installed package offers a transport"),
    *(
        _key("backends", {name: {key: value}}, f"backends.{name}: {words}")
        for name, key, value, words in (
            ("local", "tracr", "none", "there is no setting 'tracr'; did you mean"),
            ("local", "tracer", "non", "tracer='non'; did you mean 'none'? known are"),
            ("tcp", "x", "1", "there is no setting 'x'; it has none"),
            ("ucx", "tls", "", "there is no setting 'tls'; there are"),
        )
    ),
    _key("io_cpus", [-1], ": Expected `int` >= 0"),
    _key("profile", {"model": 7}, ": Expected `str`, got `int`"),
    WrongUse(
        "`open(name='x' * 200)`",
        lambda t: t.opened(name="x" * 200),
        UsageError,
        "arguments: name='xxxxxxxxxxxx...xxxxxxxxxxxxx': Expected",
    ),
    WrongUse(
        "`open(require=['tcp'], forbid=['tcp'])`",
        lambda t: t.opened(require=["tcp"], forbid=["tcp"]),
        UsageError,
        "config: ['tcp'] are both in require and in forbid",
    ),
    WrongUse(
        "`open({'lanes': 4})`",
        lambda t: untyped.open({"lanes": 4}),
        UsageError,
        "config: dict is neither a Config nor the path of a TOML file",
    ),
    WrongUse(
        "a config file that is not there",
        lambda t: kvwire.Config.load("/nowhere/kvwire.toml"),
        UsageError,
        "No such file or directory: '/nowhere/kvwire.toml'",
    ),
    WrongUse(
        "a config file that is no TOML",
        lambda t: t.toml("trust = psk"),
        UsageError,
        "Invalid value (at line 1, column 9)",
    ),
    WrongUse(
        "a key misspelt in a file",
        lambda t: t.toml("leese_s = 3"),
        UsageError,
        "there is no key 'leese_s'; did you mean 'lease_s'?",
    ),
    WrongUse(
        "a table where a number is due",
        lambda t: t.toml("[lanes]\nx = 1"),
        UsageError,
        "lanes={'x': 1}: Expected `int`, got `object`",
    ),
    WrongUse(
        "`KVWIRE_TRUSST=psk`",
        lambda t: t.loaded(trusst="psk"),
        UsageError,
        "environment variable KVWIRE_TRUSST: there is no key 'trusst'",
    ),
    WrongUse(
        "`KVWIRE_LANES=many`",
        lambda t: t.loaded(lanes="many"),
        UsageError,
        "environment variable KVWIRE_LANES: lanes='many': Expected",
    ),
    WrongUse(
        "`KVWIRE_RESUME=perhaps`",
        lambda t: t.loaded(resume="perhaps"),
        UsageError,
        "environment variable KVWIRE_RESUME: resume='perhaps': write",
    ),
    WrongUse(
        "`KVWIRE_IO_CPUS=0-3`",
        lambda t: t.loaded(io_cpus="0-3"),
        UsageError,
        "environment variable KVWIRE_IO_CPUS: io_cpus=['0-3']",
    ),
    WrongUse(
        "`config.replace(lane=1)`",
        lambda _: untyped.Config().replace(lane=1),
        UsageError,
        "arguments: there is no key 'lane'; did you mean 'lanes'?",
    ),
]

_CONNECT: Final[dict[type, dict[Any, str]]] = {
    UsageError: {
        "127.0.0.1": 'has no port; write "host:0" for any free',
        "127.0.0.1:99999": "Port out of range 0-65535",
        "127.0.0.1:port": "Port could not be cast to integer",
        "::1:80": "Port could not be cast to integer value as",
        "": "address '' has no port; write \"host:0\" for any free one",
        ":80": "address 'tcp://:80' names no host; write 127.0.0.1 for this",
        7400: 'address 7400: write "host:port", or pass a kvwire.Address',
        ("127.0.0.1", 7400): '7400): write "host:port", or pass a',
        None: 'address None: write "host:port", or pass a kvwire.Address',
        "tcp://user@127.0.0.1:80": "user@127.0.0.1:80': only scheme://host:port is",
        "tcp://127.0.0.1:80/path": "/path': only scheme://host:port is understood",
        "x" * 70 + ":80": "address 'tcp://",
        "192.0.2.1:80": "'tcp://192.0.2.1:80' means 192.0.2.1, which is not this host",
    },
    BackendUnavailable: {
        "http://127.0.0.1:80": "no backend called 'http' is installed; did",
        "tpc://127.0.0.1:80": "no backend called 'tpc' is installed; did",
        "local://127.0.0.1:80": "has no addresses of its own; connect to a",
    },
    ConnectError: {
        "127.0.0.1:1": "Connection refused",
        "inproc://nobody": "cannot connect to inproc://nobody: nobody in this process",
        "nohost.invalid:80": "cannot connect to tcp://nohost.invalid:80",
    },
}

ADDRESSES: Final = (
    [
        WrongUse(
            f"connect to `{address!r}`",
            partial(steps.connect, to=address),
            error,
            words,
        )
        for error, rows in _CONNECT.items()
        for address, words in rows.items()
    ]
    + [
        WrongUse(
            f"listen on `{address!r}`",
            partial(steps.listen, on=address),
            error,
            words,
        )
        for address, error, words in [
            (
                "0.0.0.0:0",
                UsageError,
                "'tcp://0.0.0.0:0' means 0.0.0.0, which is not this host",
            ),
            (
                "nohost.invalid:0",
                ListenError,
                "cannot listen on tcp://nohost.invalid:0",
            ),
            (
                "ucx://127.0.0.1:0",
                BackendUnavailable,
                "transport 'ucx': has no addresses of its own; connect to a",
            ),
            (0, UsageError, 'address 0: write "host:port", or pass a kvwire.Address'),
        ]
    ]
    + [
        WrongUse(
            "listen where somebody listens",
            steps.twice,
            ListenError,
            "Address already in use",
        ),
        WrongUse(
            "`connect(address, transport='ucxx')`",
            lambda t: t.a.connect("127.0.0.1:1", transport="ucxx"),
            BackendUnavailable,
            "none of the required transports can run: no backend called",
        ),
        WrongUse(
            "`connect(address, transport=7)`",
            lambda t: t.a.connect("127.0.0.1:1", transport=7),
            UsageError,
            'transport=7: a name such as "tcp", or a list of them',
        ),
        WrongUse(
            "`connect(address, timeout_s='soon')`",
            lambda t: t.a.connect("127.0.0.1:1", timeout_s="soon"),
            UsageError,
            "timeout_s='soon': a number of seconds above 0",
        ),
    ]
)


PEERS: Final = [
    WrongUse(
        "a web server at the address",
        lambda t: t.stranger(b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n"),
        HandshakeError,
        "the peer does not speak kvwire: it begins with b'HTTP/1.1 400",
    ),
    WrongUse(
        "an SSH server at the address",
        lambda t: t.stranger(b"SSH-2.0-OpenSSH_9.6\r\n"),
        HandshakeError,
        "the peer does not speak kvwire: it begins with",
    ),
    WrongUse(
        "a Redis at the address, which hangs up",
        lambda t: t.stranger(b"-ERR unknown command\r\n", ends=True),
        HandshakeError,
        "the peer does not speak kvwire: it begins with b'-ERR unknown",
    ),
    WrongUse(
        "somebody at the address who says nothing",
        lambda t: t.stranger(b""),
        HandshakeTimeout,
        "no handshake within 0.2 s; it waited for ACCEPT from the peer",
    ),
    WrongUse(
        "somebody at the address who hangs up",
        lambda t: t.stranger(b"", ends=True),
        ConnectionLost,
        "the connection ended while the handshake waited for ACCEPT",
    ),
    WrongUse(
        "somebody at the address who speaks TLS",
        lambda t: t.stranger(b"\x16\x03\x01" + bytes(40)),
        AuthenticationFailed,
        'the peer speaks TLS, as trust "mtls" does, and this side does',
    ),
    WrongUse(
        "loopback to psk",
        lambda t: t.meet({}, {"trust": "psk", "psk_file": t.key()}),
        AuthenticationFailed,
        "trust modes differ: this side loopback, peer psk; set the",
    ),
    WrongUse(
        "psk to loopback",
        lambda t: t.meet({"trust": "psk", "psk_file": t.key()}, {}),
        AuthenticationFailed,
        "trust modes differ: this side psk, peer loopback; set the",
    ),
    WrongUse(
        "another key",
        lambda t: t.meet(
            {"trust": "psk", "psk_file": t.key("k1")},
            {"trust": "psk", "psk_file": t.key("k2")},
        ),
        AuthenticationFailed,
        "the peer does not hold the same key; compare `psk_file` on",
    ),
    WrongUse(
        "loopback to mtls",
        lambda t: t.meet({}, t.ca().config(ME)),
        AuthenticationFailed,
        'the peer speaks TLS, as trust "mtls" does, and this side does',
    ),
    WrongUse(
        "mtls to loopback",
        lambda t: t.meet(t.ca().config(ME), {}),
        AuthenticationFailed,
        "the peer speaks no TLS 1.3: is its trust mtls?",
    ),
    WrongUse(
        "a certificate of another CA",
        lambda t: t.meet(t.ca("one").config(ME), t.ca("two").config(ME)),
        AuthenticationFailed,
        "no CA in tls_ca_file has signed it; both sides need a CA that",
    ),
    WrongUse(
        "a certificate whose name `tls_peers` does not list",
        steps.unlisted,
        AuthenticationFailed,
        "one side does not accept the other's certificate: its",
    ),
    WrongUse(
        "`tls_peers` with `*` and others",
        lambda t: t.opened(**t.ca().config(ME, "*", ME)),
        UsageError,
        'config: tls_peers names "*", which is everybody, and others',
    ),
    WrongUse(
        "a certificate that has expired",
        steps.expired,
        AuthenticationFailed,
        "our tls_cert_file: ",
    ),
    WrongUse(
        "a certificate that is not there",
        lambda t: t.opened(**t.ca().config(ME) | {"tls_cert_file": "/nowhere"}),
        UsageError,
        "tls_cert_file /nowhere: No such file or directory",
    ),
    WrongUse(
        "a CA file that is no PEM",
        lambda t: t.opened(**t.ca().config(ME) | {"tls_ca_file": t.file("hello")}),
        UsageError,
        "holds no certificate in PEM",
    ),
    WrongUse(
        "a key file that is not there",
        lambda t: t.opened(trust="psk", psk_file="/nowhere/key"),
        UsageError,
        "psk_file /nowhere/key: No such file or directory",
    ),
    WrongUse(
        "a key file that everybody may read",
        lambda t: t.opened(trust="psk", psk_file=t.file("00" * 32, 0o644)),
        UsageError,
        "has mode 0644 and others can read it: chmod 600 it",
    ),
    WrongUse(
        "a key file that holds a password",
        lambda t: t.opened(trust="psk", psk_file=t.file("secret")),
        UsageError,
        "holds no hexadecimal key; make one with `kvwire keygen`",
    ),
    WrongUse(
        "a key file that is too short",
        lambda t: t.opened(trust="psk", psk_file=t.file("00" * 8)),
        UsageError,
        "the key has 8 bytes; 32 to 1024 random bytes are needed: make",
    ),
    WrongUse(
        "a directory that cannot be reached",
        steps.directory_away,
        ConnectError,
        "none in 0.5 s; the directory cannot be watched",
    ),
    WrongUse(
        "another model on the other side",
        lambda t: t.meet({"profile": {"model": "a"}}, {"profile": {"model": "b"}}),
        ProfileMismatch,
        "these fields differ: 'model' (here 'a', peer 'b')",
    ),
    WrongUse(
        "transports that the sides do not share",
        lambda t: t.meet(
            {"require": ["tcp"]}, {"require": ["local"], "prefer": ["local"]}
        ),
        ProfileMismatch,
        "no transport suits both sides: 'local': 'not offered by the",
    ),
]
