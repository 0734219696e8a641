"""Three small programs, started as a person starts them, and killed.

Each answer is compared with that of the model in one process, which has nothing to do
with kvwire.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvwire.directory import open_directory
from tests.support.runs import Beside, beside, python
from tests.support.servers import redis_server
from tests.support.tree import ROOT
from toy_model import ToyModel, text_of, tokens_of

EXAMPLES = ROOT / "examples"
MODEL = ToyModel()
# 'text': 48 of 50 tokens from somebody
ANSWER = re.compile(r"('.*'): (\d+) of (\d+) tokens from (?:the )?(\S+)$")

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


def expected(prompt: str, new: int = 24) -> str:
    """What follows a prompt, by one process alone."""
    return text_of(MODEL.alone(tokens_of(prompt), new))


def answered(line: str) -> tuple[str, int, int, str]:
    """A printed answer: its text, tokens that were received, all, and from whom."""
    found = ANSWER.search(line)
    assert found, line
    return ast.literal_eval(found[1]), int(found[2]), int(found[3]), found[4]


# --- an agent's cache -----------------------------------------------------------------


async def test_a_killed_agent_computes_little_again(tmp_path: Path) -> None:
    program = (str(EXAMPLES / "agent_cache.py"), str(tmp_path / "agent"))
    lines = ("who are you, said the caterpillar", "this was not encouraging")
    said = ""
    async with beside(*program, kind=Beside, reads=True) as agent:
        assert "has 0 tokens" in await agent.line()
        for line in lines:
            prompt = f"{said}{line}. "
            text, *_ = answered(await agent.do(line))
            assert text == expected(prompt)
            said = prompt + text
        agent.signal(signal.SIGKILL)
        assert await agent.wait() == -signal.SIGKILL
    async with beside(*program, kind=Beside, reads=True) as agent:
        assert f"has {len(said)} tokens" in await agent.line()
        prompt = f"{said}why, said alice. "
        text, known, tokens, _ = answered(await agent.do("why, said alice"))
        assert text == expected(prompt)
        # Whole blocks of 16; the last token of an answer was never computed.
        assert (known, tokens) == ((len(said) - 1) // 16 * 16, len(prompt))


async def test_an_agent_is_killed_while_it_answers(tmp_path: Path) -> None:
    """What it has kept is a conversation with the answer, or the one without."""
    program = (str(EXAMPLES / "agent_cache.py"), str(tmp_path / "agent"))
    async with beside(*program, kind=Beside, reads=True) as agent:
        await agent.line()
        first = f"who are you. {answered(await agent.do('who are you'))[0]}"
        agent.write("and why")
        agent.signal(signal.SIGKILL)
        await agent.wait()
    second = f"{first}and why. {expected(f'{first}and why. ')}"
    async with beside(*program, kind=Beside, reads=True) as agent:
        tokens = int(re.findall(r"has (\d+) tokens", await agent.line())[0])
        said = {len(first): first, len(second): second}[tokens]
        text, *_ = answered(await agent.do("go on"))
        assert text == expected(f"{said}go on. ")


# --- a fleet in Redis -----------------------------------------------------------------


@contextlib.asynccontextmanager
async def worker(url: str) -> AsyncIterator[tuple[Beside, str]]:
    """A worker that clients can find, and its name."""
    program = (str(EXAMPLES / "fleet.py"), "worker", url)
    async with beside(*program, kind=Beside) as process:
        name = (await process.line()).split()[0]
        directory = open_directory(url)
        async with contextlib.aclosing(directory.watch()) as changes:
            async for change in changes:
                if change.record.name == name:
                    break
        await directory.close()
        yield process, name


async def asked(client: Beside, prompts: list[str]) -> dict[str, int]:
    """Ask all prompts at once; how many were received whole, by worker."""
    for prompt in prompts:
        client.write(prompt)
    lines = [answered(await client.line()) for _ in prompts]
    assert sorted(text for text, *_ in lines) == sorted(map(expected, prompts))
    whole = [name for _, known, tokens, name in lines if known == tokens]
    return {name: whole.count(name) for name in whole}


async def test_a_fleet_answers_while_workers_are_killed_and_join() -> None:
    prompts = [f"{letter} said the mouse, and no more" for letter in "abcd"]
    async with contextlib.AsyncExitStack() as stack:
        url = f"redis://127.0.0.1:{stack.enter_context(redis_server()).port}"
        one, name = await stack.enter_async_context(worker(url))
        _, other = await stack.enter_async_context(worker(url))
        client = await stack.enter_async_context(
            beside(str(EXAMPLES / "fleet.py"), "client", url, kind=Beside, reads=True)
        )
        assert (await asked(client, prompts)).keys() == {name, other}
        one.signal(signal.SIGKILL)
        await one.wait()
        assert (await asked(client, prompts)).keys() == {other}
        last, newest = await stack.enter_async_context(worker(url))
        assert newest in await asked(client, prompts)
        last.signal(signal.SIGINT)
        assert await last.wait() == 0


# --- threads --------------------------------------------------------------------------


async def test_threads_answer_with_prefill_and_without() -> None:
    import threads

    def answers(address: str) -> list[int]:
        """Run decode to its end; how many tokens of each prompt were received."""
        done = python(EXAMPLES / "threads.py", "decode", address, check=True)
        lines = list(map(answered, done.stdout.splitlines()))
        prompts = threads.PROMPTS.values()
        assert [line[0] for line in lines] == list(map(expected, prompts))
        assert [line[2] for line in lines] == whole
        return [line[1] for line in lines]

    whole = [len(prompt) - 1 for prompt in threads.PROMPTS.values()]
    program = (str(EXAMPLES / "threads.py"), "prefill")
    async with beside(*program, kind=Beside) as prefill:
        address = (await prefill.line()).split()[-1]
        for _ in range(2):
            assert await asyncio.to_thread(answers, address) == whole
        prefill.signal(signal.SIGKILL)
        await prefill.wait()
        assert await asyncio.to_thread(answers, address) == [0, 0, 0]
    async with beside(*program, kind=Beside) as prefill:
        await prefill.line()
        prefill.signal(signal.SIGINT)
        assert await prefill.wait() == 0


# --- a server with an inference engine ------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "lacks"), [("transformers", "torch"), ("mlx", "mlx")]
)
async def test_an_engine_that_is_not_installed_is_named(
    engine: str, lacks: str, tmp_path: Path
) -> None:
    """Before the store is opened, which allocates its disk."""
    program = str(EXAMPLES / "engine_server.py")
    arguments = ["--engine", engine, str(tmp_path / "kv")]
    code = (
        f"import runpy, sys; sys.modules[{lacks!r}] = None; "
        f"sys.argv = {[program, *arguments]}; "
        f"runpy.run_path({program!r}, run_name='__main__')"
    )
    done = await asyncio.to_thread(python, "-c", code)
    assert done.returncode == 1
    assert f"{engine} needs {lacks}" in done.stderr
    assert f": pip install './packages/engines[{engine}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "kv").exists()
