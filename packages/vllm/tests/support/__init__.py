"""Engines for tests: vLLM's parts as fakes, engines of HTTP as functions, real servers.

=========== ====================================================================
fakes       vLLM's scheduler and workers as far as the connectors look at them
steps       one prompt's way through two such workers
scheduling  vLLM's own scheduler before a model of arithmetic
own_http    the HTTP server of an engine that asks itself
proxies     the proxy before engines that are functions, and its clients
decoders    such engines that decode token by token
serving     real servers of vLLM and the proxy, as processes
pairs       a prefill and a decode server; models, relay, digests, store_server
fleets      several servers behind a proxy
=========== ====================================================================
"""
