"""An OpenAI-compatible front for prefill and decode engines of vLLM.

``python -m kvwire.integrations.vllm.proxy --help``; docs/howto/vllm.md shows
it with ``vllm serve``. Needs Starlette, aiohttp and uvicorn, all of which vLLM brings.
"""
