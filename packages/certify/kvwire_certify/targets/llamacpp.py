"""llama.cpp's slots: what its server holds after it has reported a restore.

The server of the wheel xllamacpp runs in a process of its own, with a model whose token
has 4 KiB of keys and values. An offer is a slot file with the offered bytes in their
place; to withdraw is to remove it. A get lets the server restore the file into its only
slot, and believes what the server reports. Then it lets the server save the slot, and
brings what the server holds. So a restore that is reported, and has not happened, is
found, as in llama.cpp#26676.

The server's memory is its own, and both ends copy: this target shows whose bytes the
server would answer with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import xllamacpp

from kvwire.aio import start_task
from kvwire_certify.transport import End
from kvwire_engines.llamacpp.slot_file import SlotFile, SlotForm, read_slot, write_slot

_HEADS: Final = 8
_HEAD: Final = 128
_WIDTH: Final = 64
# The largest offers are 1,024 tokens.
_TOKENS_MAX: Final = 2048
_ELEMENTS: Final = _HEADS * _HEAD
_F16: Final = (1, 2 * _ELEMENTS)
# Of one layer, with flash attention and without rotation, as the server is started.
_FORM: Final = SlotForm(1, 0, 1, (0, 0), _F16, _F16, 0)


class LlamaCppEnd(End):
    """At the left a server; at the right its slot files are written."""

    version: str = metadata.version("xllamacpp")

    async def open(self, memory: memoryview) -> bytes:
        self.folder: Any = tempfile.TemporaryDirectory(prefix="kvwire-certify-")
        self.turn: asyncio.Lock = asyncio.Lock()
        self.starting: asyncio.Task[tuple[Process, int]] | None = None
        return self.folder.name.encode()

    async def offer(self, data: memoryview) -> bytes:
        count = -(-len(data) // _FORM.row_bytes)
        rows = np.zeros((1, count, _FORM.row_bytes), np.uint8)
        rows.reshape(-1)[: len(data)] = data
        name = secrets.token_hex(8)
        written = write_slot(SlotFile(_FORM, np.full(count, 97), rows))
        _write(Path(self.peer.decode(), name), written)
        return name.encode()

    async def withdraw(self, reference: bytes) -> None:
        _take(Path(self.peer.decode(), reference.decode()))

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        async with asyncio.timeout(timeout_s), self.turn:
            await self.restore(reference.decode())
            held = await self.held()
        into[: len(held)] = held[: len(into)]
        return True

    async def restore(self, name: str) -> None:
        """Let the server restore a file, and believe its answer."""
        await self.ask("restore", name)

    async def held(self) -> bytes:
        """Return the rows that the server's slot holds now."""
        name = secrets.token_hex(8)
        try:
            count = (await self.ask("save", name))["n_saved"]
        finally:
            saved = _take(Path(self.folder.name, name))
        return read_slot(saved).rows.tobytes() if count else b""

    async def ask(self, action: str, name: str) -> Any:
        """Ask the server, which is started for the first get."""
        if self.starting is None:
            self.starting = start_task(self.start())
        _, port = await asyncio.shield(self.starting)
        body = json.dumps({"filename": name})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(
                f"POST /slots/0?action={action} HTTP/1.0\r\n"
                f"Content-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.transport.abort()
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise OSError(f"{action}: {answer.decode(errors='replace')}")
        return json.loads(answer)

    async def start(self) -> tuple[Process, int]:
        """Start the server; return its process and port."""
        command = (sys.executable, "-m", __name__, self.folder.name)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        try:
            port = await process.stdout.readline()
        except asyncio.CancelledError:
            await _end(process)
            raise
        if not port:
            raise OSError("llama.cpp's server has ended at its start")
        return process, int(port)

    async def close(self) -> None:
        if self.starting is not None:
            self.starting.cancel()  # nothing if it has started
            await asyncio.wait([self.starting])
            if not self.starting.cancelled() and not self.starting.exception():
                await _end(self.starting.result()[0])
        self.folder.cleanup()


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _take(path: Path) -> bytes:
    """Remove a file, and return its content; b"" if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    finally:
        path.unlink(missing_ok=True)


def _write_model(path: Path) -> None:
    """Write a model of zeros: it answers nothing."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(_TOKENS_MAX)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [chr(256 + number) for number in range(256)]
    tokens[97] = "a"
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a a"])
    sizes = {
        "token_embd": (len(tokens), _WIDTH),
        "output_norm": (_WIDTH,),
        "output": (len(tokens), _WIDTH),
        "blk.0.attn_norm": (_WIDTH,),
        "blk.0.ffn_norm": (_WIDTH,),
        "blk.0.attn_q": (_ELEMENTS, _WIDTH),
        "blk.0.attn_k": (_ELEMENTS, _WIDTH),
        "blk.0.attn_v": (_ELEMENTS, _WIDTH),
        "blk.0.attn_output": (_WIDTH, _ELEMENTS),
        "blk.0.ffn_gate": (_WIDTH, _WIDTH),
        "blk.0.ffn_up": (_WIDTH, _WIDTH),
        "blk.0.ffn_down": (_WIDTH, _WIDTH),
    }
    for name, size in sizes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _serve(folder: str) -> None:
    """Run a server, print its port, and end with the process that started it."""
    model = Path(folder, "model.gguf")
    _write_model(model)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.port = 0
    parameters.slot_save_path = f"{folder}/"
    parameters.n_ctx = _TOKENS_MAX
    parameters.n_parallel = 1
    parameters.warmup = parameters.fit_params = False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.flash_attn_type = (
        xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    )
    server = xllamacpp.Server(parameters)
    print(server.listening_address.rpartition(":")[2].rstrip("/"), flush=True)
    sys.stdin.read()


TARGET = LlamaCppEnd

if __name__ == "__main__":
    _serve(sys.argv[1])
