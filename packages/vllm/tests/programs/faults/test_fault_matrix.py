"""What the fault matrix makes of answers, without vLLM."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from packages.vllm.tests.programs.faults.__main__ import bad, table
from packages.vllm.tests.programs.faults.answers import Outcome, Reference, judged
from packages.vllm.tests.programs.faults.arena import Tally
from packages.vllm.tests.programs.faults.bystanders import rewound
from packages.vllm.tests.programs.faults.cases import COMPUTED_ONCE
from packages.vllm.tests.support import steps
from packages.vllm.tests.support.serving import metric_of
from tests.support.servers import free_port
from tests.support.waiting import eventually


def answer(*tokens: int, best: tuple[float, float] = (9.0, 5.0)) -> Any:
    logits = [{f"token_id:{one}": best[0], "token_id:7": best[1]} for one in tokens]
    return {
        "choices": [{"token_ids": list(tokens), "logprobs": {"top_logprobs": logits}}]
    }


@pytest.mark.parametrize(
    ("best", "said", "outcome"),
    [
        ((9.0, 5.0), (1, 2, 3), Outcome.RIGHT),
        ((9.0, 5.0), (1, 7, 3), Outcome.WRONG),
        ((9.0, 5.0), (1, 2), Outcome.WRONG),
        # bfloat16 has 8 bits: between 9 and 9.03 it has no number.
        ((9.03, 9.0), (1, 7, 9), Outcome.NEAR),
        ((9.03, 9.0), (1, 8, 3), Outcome.WRONG),
    ],
)
def test_an_answer_is_judged_by_its_first_other_token(
    best: tuple[float, float], said: tuple[int, ...], outcome: Outcome
) -> None:
    known = Reference.of([5], answer(1, 2, 3, best=best))
    assert judged(known, answer(*said)) is outcome


@pytest.mark.parametrize(
    ("tally", "never"),
    [
        (Tally(Counter({"right": 9, "near tie": 1, "client left": 3}), again=5), False),
        (Tally(Counter({"right": 9, "wrong": 1})), True),
        (Tally(Counter({"hang": 1})), True),
        (Tally(crashes=1), True),
        (Tally(leaked=1), True),
        (Tally(harmed=1), True),
        (Tally(rewound=1), True),
    ],
)
def test_what_never_may_happen(tally: Tally, never: bool) -> None:
    assert bad("cut", tally) is never


@pytest.mark.parametrize("case", COMPUTED_ONCE)
def test_nothing_is_computed_twice_for_want_of_patience(case: str) -> None:
    assert bad(case, Tally(again=1))
    assert not bad(case, Tally())


def test_who_was_set_back_for_others() -> None:
    """As the log of an engine has it, in which each line says when and where."""
    lost = "WARNING 11-27 [receiving.py:109] transfer ab: 2 of 3 blocks of 'kv' did not"
    none = "WARNING 11-27 [receiving.py:102] could not start transfer cd: refused"
    back = "[scheduler.py] Recovered from KV load failure: %d request(s) rescheduled"
    assert rewound("\n".join((lost, none, back % 2))) == 0
    assert rewound("\n".join((lost, none, back % 1, back % 3))) == 2
    assert rewound("Failing 1 request(s) due to KV load failure") == 1


def test_the_connector_names_whoever_lacks_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    back = "Recovered from KV load failure: 1 request(s) rescheduled"
    with steps.workers(load_timeout_s=0.1) as (prefill, decode):
        nobody = f"tcp://127.0.0.1:{free_port()}"
        for remote in (nobody, prefill.side.address):
            caplog.clear()
            steps.fetch(decode, steps.fetching((remote,)))
            assert eventually(lambda: "d" in decode.side.finished(())[1])
            assert rewound(f"{caplog.text}\n{back}") == 0


def test_a_metric_by_one_of_its_labels() -> None:
    text = 'a_total{of="x"} 3.0\na_total{of="y"} 4.0\nb_total{of="x"} 5.0\n'
    assert metric_of(text, "a_total") == 7
    assert metric_of(text, "a_total", 'of="x"') == 3


def test_the_table() -> None:
    rows = {"kvwire": {"cut": Tally(Counter({"right": 7, "hang": 1}), slowest_s=2.04)}}
    _, _, line = table(rows).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["cut", "kvwire", "8", "7", "0"]
    assert cells[-1] == "2.0 s"
    json.dumps(vars(rows["kvwire"]["cut"]))
