"""An agent whose KV survives `kill -9`.

    python examples/agent_cache.py /tmp/agent

Each line that you type is added to the conversation, and the whole conversation is the
prompt of the next answer. Kill the process, start it again and type another line: the
KV so far comes from the disk, and little more than the new line is computed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvwire.kv.hashing import HashScheme
from kvwire_store import BlockStore
from toy_model import SPEC, Pool, ToyModel, blocks_for, text_of, tokens_of

NEW = 24
PLACES = 1024  # the most that the model supports
model = ToyModel()
scheme = HashScheme(SPEC.block_tokens)


async def answer(store: BlockStore, prompt: list[int]) -> tuple[list[int], int]:
    """Generate; also return the number of tokens whose KV came from the store."""
    pool = Pool(PLACES // SPEC.block_tokens)
    blocks = blocks_for(len(prompt) + NEW)
    # The last token is computed in any case: the answer begins with its output.
    hashes = scheme.block_hashes(prompt[:-1])
    outcome = await store.get(hashes, pool.cache, blocks[: len(hashes)])
    known = outcome.usable_tokens
    new = await asyncio.to_thread(model.answer, prompt, pool, blocks, NEW, known)
    hashes = scheme.block_hashes(prompt + new[:-1])
    await store.put(hashes, pool.cache, blocks[: len(hashes)])  # now it is on the disk
    return new, known


async def converse(folder: Path, said: str) -> None:
    """Answer each line of the standard input, until its end."""
    tiers = ["memory:16MiB", f"disk:{folder / 'kv'}?size=64MiB"]
    async with BlockStore.open(tiers) as store:
        print(f"the conversation has {len(said)} tokens; type a line", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            prompt = tokens_of(said + line.strip() + ". ")
            if len(prompt) + NEW > PLACES:
                sys.exit(f"the conversation is full: delete {folder}")
            new, known = await answer(store, prompt)
            said = text_of(prompt + new)
            keep(folder, said)
            print(f"{text_of(new)!r}: {known} of {len(prompt)} tokens from the store")
            sys.stdout.flush()


def keep(folder: Path, said: str) -> None:
    """Replace the file of the conversation; a kill leaves the old or the new one."""
    part = folder / "conversation.part"
    part.write_text(said)
    part.replace(folder / "conversation.txt")


def main(folder: Path) -> None:
    """Continue the conversation in a folder, or begin one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "conversation.txt"
    asyncio.run(converse(folder, file.read_text() if file.exists() else ""))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
