"""``kvwire bench``: compares kvwire with simpler programs over your transports.

An absolute figure depends more on the machine than on the library. So each benchmark
runs kvwire and another program with the same work, on the same machine in the same
minute, and reports medians and their ratio.

A contender is two processes, each with one coroutine. They know nothing of each other
but what they measure: this process tells both of them what to do next.

* ``work``: what a round moves, and the memory that it moves.
* ``sides``: kvwire's two sides; ``bare``: those of others.
* ``pair``: the two processes of a contender, and on which CPUs.
* ``turns``: cases, and the rounds in which contenders take turns.
* ``report``: the table, the JSON document, the common options.

Benchmarks of other software are in ``packages/certify/tests/bench`` of the source tree.
"""
