"""The command as a whole: help, version, and errors as one line."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvwire
from kvwire.cli import logs
from kvwire.cli import main as command
from kvwire.cli.main import CALLED_WRONG, FAILED, INTERRUPTED, app, main
from tests.support.runs import python, ran


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-W", "error", "-m", "kvwire", *arguments)


def test_python_m_kvwire_is_the_command_that_is_installed() -> None:
    script = Path(sys.executable).with_name("kvwire")
    installed = ran(script, "--version")
    for done in (run("--version"), installed):
        assert (done.returncode, done.stdout) == (0, f"{kvwire.__version__}\n")


@pytest.mark.parametrize(
    ("group", "known"),
    [("", "bench"), ("bench", "ops"), ("directory", "ls"), ("store", "serve")],
)
def test_help_says_what_each_command_does(
    group: str, known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*group.split(), "--help"]) == 0
    rows = re.findall(r"^│ (\w+) +(\w*)", capsys.readouterr().out, re.MULTILINE)
    said = dict(rows)
    assert known in said
    assert all(said.values()), said


def test_help_loads_no_numpy() -> None:
    """Nobody waits for NumPy to read which commands there are."""
    code = (
        "import sys; from kvwire.cli.main import main; main(['--help']);"
        "sys.exit('numpy' in sys.modules or 'kvwire_certify.bench' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False
    )
    assert done.returncode == 0


def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a command of the tests log a line of each level, and one of another."""

    def call(*_: object, **__: object) -> None:
        for number, name in enumerate(logs.LEVELS, 1):
            logging.getLogger("kvwire.store").log(10 * number, "at %s", name)
        logging.getLogger("elsewhere").info("not ours")

    calls(call, monkeypatch)


def calls(call: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.app is app
    monkeypatch.setattr(command, "app", call)


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        ([], "", ["warning", "error"]),
        (["store", "stats"], "debug", ["debug", "info", "warning", "error"]),
        (["--log-level", "info", "top"], "debug", ["info", "warning", "error"]),
        (["top", "--log-level=ERROR"], "", ["error"]),
    ],
)
def test_a_level_of_the_log_for_every_command(
    arguments: list[str],
    variable: str,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wherever it stands; each line has the time, the level and the logger."""
    _logs(monkeypatch)
    monkeypatch.setenv("KVWIRE_LOG_LEVEL", variable)
    before = logging.getLogger("kvwire").level, list(logging.getLogger().handlers)
    assert main(arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    ours = [line for line in lines if "kvwire.store" in line]
    assert ours == lines
    assert [line.rpartition(" ")[2] for line in ours] == said
    assert re.match(r"\d{4}-\d\d-\d\d .* ERROR kvwire.store: at error", ours[-1])
    assert (logging.getLogger("kvwire").level, logging.getLogger().handlers) == before


def test_the_level_is_no_option_behind_a_double_dash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["x", "--", "--log-level", "debug"]
    assert logs.take_level(given) == (given, "warning")


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        (["--log-level", "inof"], "", "--log-level=inof: did you mean 'info'?"),
        (["config", "show", "--log-level"], "", "--log-level=: known are debug"),
        ([], "loud", "KVWIRE_LOG_LEVEL=loud: known are debug, error, info, warning"),
    ],
)
def test_a_level_that_is_none_is_called_wrong(
    arguments: list[str],
    variable: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVWIRE_LOG_LEVEL", variable)
    assert main(arguments) == CALLED_WRONG
    assert said in capsys.readouterr().err


def test_the_variable_of_the_level_is_no_key() -> None:
    assert kvwire.Config.load(environment={"KVWIRE_LOG_LEVEL": "debug"}) == (
        kvwire.Config.load(environment={})
    )


def test_an_unknown_command_is_called_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygne"]) == CALLED_WRONG
    assert "keygen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("config --nope", '"--nope"'),
        ("doctor --pid x", "--pid"),
        ("bench ops --peer x", "has no port"),
        ("top nohost", "nohost: No such file"),
        ("trace /nope", "/nope: No such file"),
        ("keygen", "FILE"),
        ("keygen /nope/x", "/nope/x: No such file"),
        ("bench ops --size 7", "--size"),
        ("bench ops --transport nope", "nope"),
        ("bench fragments --rounds -1", "--rounds"),
        ("bench messages --loop nope", "--loop"),
        ("nonsense", "unknown command 'nonsense'; known are"),
        ("directory list", "did you mean 'ls'"),
        ("directory ls --directory nope://x", "nope"),
        ("store serve --listen x", "--tier"),
        ("store delete 127.0.0.1:1 zz", "zz"),
        ("certify nope", "'nope'"),
        ("certify tier nope", "nope"),
    ],
)
def test_wrong_arguments_are_told_by_name_without_a_traceback(
    arguments: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == CALLED_WRONG
    error = capfd.readouterr().err
    assert said in " ".join(error.split())
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (kvwire.UsageError("x=1: use x=2"), CALLED_WRONG),
        (kvwire.BackendUnavailable("no such transport: pip install it"), FAILED),
    ],
)
def test_an_error_of_kvwire_is_one_line(
    error: kvwire.KVWireError,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raises(error, monkeypatch)
    assert main([]) == status
    assert capsys.readouterr().err == f"kvwire: {error}\n"


def test_any_other_error_is_a_bug_and_shows_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raises(ZeroDivisionError(), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        main([])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("x needs y: pip install y"), "x needs y: pip install y"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (FileNotFoundError(2, "No such file", "/a/b"), "/a/b: No such file"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    error: Exception,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raises(error, monkeypatch)
    assert main([]) == FAILED
    assert capsys.readouterr().err == f"kvwire: {said}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["config", "show"],
        ["config", "show", "--json"],
        ["directory", "ls", "--json", "--directory", "file:/nobody/here"],
    ],
)
def test_a_reader_that_has_gone_is_no_news(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvwire", *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (FAILED, "")


@pytest.mark.parametrize(
    ("arguments", "closed", "status"),
    [
        ("directory ls --json --directory file:/nobody/here", ">&-", 0),
        ("directory ls --json --directory file:/nobody/here", ">&- 2>&-", 0),
        ("keygne", "2>&-", CALLED_WRONG),
        ("directory ls --directory nowhere:", "2>&-", CALLED_WRONG),
    ],
)
def test_output_that_is_closed_is_not_missed(
    arguments: str, closed: str, status: int
) -> None:
    """Nor does what belongs there go elsewhere."""
    command_line = f'exec "$0" -W error -m kvwire {arguments} {closed}'
    done = ran("sh", "-c", command_line, sys.executable)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def test_a_name_that_the_locale_cannot_write() -> None:
    environment = {**os.environ, "KVWIRE_NAME": "\u540d", "PYTHONIOENCODING": "ascii"}
    for option, shown in ("", b'"\\u540d"'), ("--json", '"\u540d"'.encode()):
        done = subprocess.run(
            [sys.executable, "-m", "kvwire", "config", "show", *option.split()],
            env=environment,
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert shown in done.stdout


def test_help_has_no_empty_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor flags that only say what is so without them."""
    for words in ("doctor", "store serve", "top", "bench fragments"):
        assert main([*words.split(), "--help"]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", "").split())
        assert "--no-" not in said
        assert not re.search(r"\[default: (\"\"|False|0|\(|\])", said), said


def test_ctrl_c_is_what_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    raises(KeyboardInterrupt(), monkeypatch)
    assert main([]) == INTERRUPTED


def test_ctrl_c_between_imports_ends_it_too() -> None:
    """Nothing catches KeyboardInterrupt there, so it is the signal that ends it."""
    code = (
        "import os, signal, sys\n"
        "from kvwire.__main__ import run\n"
        "class Interrupts:\n"
        "    def find_spec(*_):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts)\n"
        "run()\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*_: object, **__: object) -> None:
        raise error

    calls(call, monkeypatch)


@pytest.mark.parametrize("columns", ["0", "7", "-3", "wide", "9" * 5000])
@pytest.mark.parametrize("command", ["store serve --help", "--help", "config show"])
def test_a_width_that_has_no_room_is_not_believed(columns: str, command: str) -> None:
    done = python(
        "-m",
        "kvwire",
        *command.split(),
        check=True,
        env={**os.environ, "COLUMNS": columns},
    )
    assert max(map(len, done.stdout.splitlines())) > 20


@pytest.mark.parametrize("command", [["doctor"], ["top", "--once"]])
def test_lines_that_are_piped_are_not_wrapped(
    command: list[str], tmp_path: Path
) -> None:
    name = "a" * 100
    with kvwire.Engine(name=name, inspect=str(tmp_path / "run")):
        env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
        done = python(
            "-m",
            "kvwire",
            *command,
            check=True,
            env={**env, "KVWIRE_INSPECT": str(tmp_path / "run")},
        )
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) > 100
    assert all(line == line.rstrip() for line in lines)


def test_help_and_version_are_found_where_people_look(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["help", "store", "serve"]) == 0
    asked = capsys.readouterr().out
    assert main(["store", "serve", "--help"]) == 0
    assert capsys.readouterr().out == asked
    assert main(["help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main(["-V"]) == 0
    assert capsys.readouterr().out == f"{kvwire.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    startup = [tmp_path / name for name in (".bashrc", ".zshrc", ".profile")]
    for file in startup:
        file.write_text("mine\n")
    to = tmp_path / "completion"
    command = ["--install-completion", "--shell", shell, "--output", str(to)]
    assert main(command) == 0
    assert "doctor" in to.read_text()
    assert [file.read_text() for file in startup] == ["mine\n"] * 3
