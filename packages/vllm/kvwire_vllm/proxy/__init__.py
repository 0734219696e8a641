"""An OpenAI-compatible proxy in front of vLLM's prefill and decode engines.

Start it with ``python -m kvwire_vllm.proxy``. docs/howto/vllm.md shows it
with ``vllm serve``. It needs aiohttp and prometheus-client, which vLLM brings.
"""
