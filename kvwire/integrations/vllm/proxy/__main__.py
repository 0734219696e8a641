"""``python -m kvwire.integrations.vllm.proxy``: run the proxy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.integrations.vllm.proxy.engines import BY_PREFIX, ROUND_ROBIN, parse_engine
from kvwire.integrations.vllm.proxy.requests import AT_ONCE, IN_SEQUENCE
from kvwire.integrations.vllm.references import References
from kvwire.security.keys import read_key_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proxy until it is interrupted; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        prefill = [parse_engine(text) for text in options.prefill]
        decode = [parse_engine(text) for text in options.decode]
        keys = [read_key_file(options.psk_file)] if options.psk_file else []
    except UsageError as exc:
        parser.error(str(exc))
    try:
        # The help needs none of these.
        from kvwire.integrations.vllm.proxy.app import make_app  # noqa: PLC0415

        with needed_by("the proxy", extra="vllm"):
            import uvicorn  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        print(exc, file=sys.stderr)
        return 1
    app = make_app(
        prefill,
        decode,
        order=options.order,
        route=options.route,
        references=References(keys),
    )
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvwire.integrations.vllm.proxy",
        description="Sends each request to a prefill and a decode engine of vLLM.",
    )
    engine = "URL=KV[,KV...]: where it serves, and where each rank of it listens"
    parser.add_argument("--prefill", action="append", required=True, help=engine)
    parser.add_argument("--decode", action="append", required=True, help=engine)
    parser.add_argument("--psk-file", help="the engines' key, if they have one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--order",
        choices=(AT_ONCE, IN_SEQUENCE),
        default=AT_ONCE,
        help="both engines at once, or decode when prefill has answered",
    )
    parser.add_argument(
        "--route",
        choices=(ROUND_ROBIN, BY_PREFIX),
        default=ROUND_ROBIN,
        help="which prefill engine: in turns, or equal beginnings to the same one",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
