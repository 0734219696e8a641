"""Engines for tests: vLLM's parts as fakes, engines of HTTP as functions, real servers.

=========== ====================================================================
fakes       vLLM's scheduler and workers as far as the connectors look at them
steps       one prompt's way through two such workers
proxies     the proxy before engines that are functions, and its clients
serving     real servers of vLLM and the proxy, as processes
pairs       a prefill and a decode server; models, relay, digests, store_server
=========== ====================================================================
"""
