"""A llama-server over the wheel: python -m packages.engines.tests.llama_server ..."""

from __future__ import annotations

import signal
import sys

import xllamacpp as llama


def main(model: str, folder: str, cache_type: str) -> None:
    """Serve a model on a free port until a signal; print the address."""
    options = llama.CommonParams()
    options.model.path = model
    options.slot_save_path = f"{folder}/"
    options.n_parallel = 2
    options.n_ctx = 24_000
    options.port = 0
    options.warmup = options.ui = False
    options.cache_ram_mib = 0  # it would hide what a slot lacks
    options.cpuparams.n_threads = 1
    kind = getattr(llama.ggml_type, f"GGML_TYPE_{cache_type.upper()}")
    options.cache_type_k = options.cache_type_v = kind
    options.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    server = llama.Server(options)
    print(server.listening_address, flush=True)
    signal.pause()
    del server


if __name__ == "__main__":
    main(*sys.argv[1:])
