"""Races and faults that have happened in the field, each with the report of it.

The tests here run over ``inproc`` in virtual time, and over TCP. Reports are issues and
pull requests of the projects on GitHub. (Scenario R11 is not goal R11 of
docs/topics/reliability.md.)

``tests/transfers/test_machine.py``, in any order and number:
* R01 receiver aborts while a write is in flight (SGLang #35049)
* R10 peer dies during a transfer (vLLM #28120); real processes: ``tests/programs/soak``
* R12 peer leaves while transfers run (Ray #65962)
* R13 completion arrives after an abort, or twice (vLLM #53079)
* R14 abort with both a receive and a send pending (vLLM #56089)
* R15 peer is silent after an abort (vLLM #46283)
* R16 an id is reused
* R17 preemption while a send reads the blocks (vLLM #52360)
* R26 either side comes first
* R46 several layers share one slot (vllm-ascend #14046)
* R47 every delayed free has an owner and an end (vllm-ascend #10843)

The others in ``tests/transfers``, ``tests/fault`` and ``tests/kv``:
* R02 one of several consumers fails while the others run (vLLM #56104),
  ``test_outgoing``
* R03 lease expires and the receiver comes late (vLLM #21570), ``test_registry``
* R04 receiver is slow but alive, ``test_transfer``
* R05 receiver rejects before admission (vLLM #41269), ``test_registry``
* R06 sender cannot post a planned write (vLLM #50754), ``test_incoming``
* R07 completion message is lost (TensorRT-LLM #17665), ``test_last_word``
* R08 sender fails before the receiver registers (SGLang #30329), ``test_registry``
* R09 peer dies during the handshake (vLLM #26171), ``test_handshake_cuts``
* R18 an empty hand-over is an error, not a success (vLLM #50297), and R22 a layer has
  no hook (vLLM #56874), ``test_ready_log`` and ``test_outgoing``
* R28 some requests of a batch lose their KV (vLLM #12285), ``test_prefill_plan``
* R29 failed blocks are shared by two requests (vLLM #49250), ``test_prefill_plan``
* R30 a failure wakes an idle engine, ``test_incoming``
* R35 a mismatch is refused and named on both sides (vLLM #29503), ``test_geometry`` and
  ``tests/protocol/test_raw_client.py``

``test_peers.py``:
* R11 peer restarts on the same address (vLLM #50047)

``test_memory.py``:
* R19 a stalled writer blocks no other transfer and frees no memory (vLLM #55589)
* R49 the producer frees while its last layers are queued

``test_commit.py``:
* the queue of waiting transfers is bounded
* R27 two forwards mark the same part (SGLang #40100)
* R45 a layer fails and the last one succeeds (vllm-ascend #8740)

``test_partial.py``:
* R30 a failure wakes a thread that waits
* R31 block ids of two cache groups collide (vLLM #54733)
* R32 clocks differ between hosts

``test_meeting.py``:
* R33 a storm of handshakes (Mooncake #2912)
* R36 the decode pool is full (SGLang #40703)
* R43 the first bytes are not a handshake (SGLang #21435), over TCP alone
* R44 hashes of another scheme (LMCache #1139)

``test_loops.py``:
* a failed call leaves nothing behind
* R41 the loop ends while transfers run
* R42 a request after idle hours (SGLang #9926), over ``inproc`` alone

Elsewhere:
* R25 the commit overtakes the data (TensorRT-LLM #17665), the simulator
* R34 a slow handshake delays no other connection (vLLM #46116),
  ``tests/fault/test_strangers.py``
* R37 staging buffer exhausted (SGLang #39992),
  ``tests/driver/test_device_staging.py``
* R39 a preferred or required transport is missing (vLLM #52607),
  ``tests/backend/test_selection.py``
* R40 a completion meets a cancelled waiter, ``tests/endpoint/test_request.py``
* R48 a peer is not found inside the producer's hook (vllm-ascend #7514),
  ``tests/endpoint/test_peer.py``
* R38 memory registration fails (Mooncake #2511),
  ``tests/backends/kvwire_ucx/test_registration.py``

Not tested, for want of a GPU:
* R20 a CUDA graph replay skips the hooks (vLLM #31057)
* R21 a layer is reported before its kernel has finished, and R23 a progress value of
  an earlier forward (SGLang #40100)
* R24 done, but not visible to the GPU (kvcache-ai/vllm #3)
"""
