"""Pages that somebody walks through: what is typed and waited for."""

from __future__ import annotations

import pytest

from tests.programs import walk
from tests.support.tree import ROOT

PAGE = """\
# A page

```sh
word=walked
( sleep 0.1; echo "it has $word" ) &    # prints: has walked
echo over
```

```sh
exit 1
```
"""


def test_a_walk_types_each_command_and_waits_for_what_it_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    walk.walk(PAGE)
    assert capsys.readouterr().out.splitlines() == [
        "$ word=walked",
        '$ ( sleep 0.1; echo "it has $word" ) &',
        "it has walked",
        "$ echo over",
        "over",
    ]


def test_a_command_that_fails_ends_the_walk() -> None:
    with pytest.raises(SystemExit, match="false: exit status 1"):
        walk.walk("```sh\ntrue\nfalse\ntrue\n```\n")


def test_the_first_answer_takes_two_minutes_of_typing() -> None:
    page = (ROOT / "docs" / "tutorial" / "first-answer.md").read_text()
    typed = sum(len(command) + 1 for command, _ in walk.commands(page))
    assert typed / walk.TYPED_PER_S <= 120
