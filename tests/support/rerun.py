"""Runs the tests that failed once more, by themselves, if the environment allows it.

``TESTS_RERUN_MAX=3``, as ``.ci/run`` sets it: a run of thousands of tests on a busy
machine in which up to three failed passes if these pass alone, and names them. A test
that fails once in 100,000 cases would otherwise stop every third run of ``.ci/run``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RERUN_MAX = "TESTS_RERUN_MAX"


class FailedTests:
    """The tests of a run that failed, in order, and whether they passed alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failed: dict[str, None] = {}
        self._passed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hook of pytest: note a failure, of a teardown too."""
        if report.failed:
            self._failed[report.nodeid] = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Hook of pytest: the second run, which decides."""
        few = 0 < len(self._failed) <= self._most
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not few:
            return
        given = session.config.invocation_params
        places = set(session.config.option.file_or_dir)
        options = [str(one) for one in given.args if one not in places]
        again = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-n0", *self._failed],
            cwd=given.dir,
            env={
                name: value for name, value in os.environ.items() if name != RERUN_MAX
            },
            check=False,
        )
        if again.returncode == pytest.ExitCode.OK:
            self._passed = True
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Hook of pytest: name the tests that failed by chance."""
        if self._passed:
            terminalreporter.section("failed, and passed when run by themselves")
            terminalreporter.write_line("Each is a bug, in the test or behind it:")
            for name in self._failed:
                terminalreporter.write_line(name)


def pytest_configure(config: pytest.Config) -> None:
    """Hook of pytest: of the process that the user started, not of its workers."""
    most = int(os.environ.get(RERUN_MAX, "0"))
    if most and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedTests(most))
