"""An OpenAI-compatible front for prefill and decode engines of vLLM.

``python -m kvwire.integrations.vllm.proxy --help``; docs/howto/vllm.md shows
it with ``vllm serve``. Needs aiohttp and prometheus-client, which vLLM brings.
"""
