/* Copies pieces of memory, and reads windows: all pieces and blocks in one call.
 *
 * kvwire/memory/pieces.py and generations.py and kvwire_local/blocks.py call this by
 * ctypes and do the same without it; nothing here knows Python. hatch_build.py compiles
 * it where kvwire is installed.
 *
 * A store to memory that is not in a cache reads its line first. Stores past the caches
 * do not, which doubles the rate of copies that are larger than the caches: on an AMD
 * EPYC 64 MiB in pieces of 32 KiB go at 12.7 GB/s out of a KV cache and at 17.3 into
 * one, where memcpy piece by piece has 9.3 and 7.2. What is smaller stays in the caches
 * for whoever reads it next: at 1 MiB twice as fast as after stores past them.
 */

#define _GNU_SOURCE /* process_vm_readv */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The CRC-32 of this file, with which a library of another one is recognised. */
#ifndef KVWIRE_SOURCE
#define KVWIRE_SOURCE 0
#endif
const uint32_t kvwire_source = KVWIRE_SOURCE;

/* Shorter pieces have hardly a whole line. */
static const uint64_t STREAMED_PIECE = 1024;
static const uint64_t STREAMED_TOTAL = 8 << 20;

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64 };

static void stream(char *to, const char *from, uint64_t length) {
  uint64_t head = -(uintptr_t)to & (LINE - 1);
  memcpy(to, from, head);
  to += head, from += head, length -= head;
  for (; length >= LINE; to += LINE, from += LINE, length -= LINE) {
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)from + 1);
    __m128i c = _mm_loadu_si128((const __m128i *)from + 2);
    __m128i d = _mm_loadu_si128((const __m128i *)from + 3);
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)to + 1, b);
    _mm_stream_si128((__m128i *)to + 2, c);
    _mm_stream_si128((__m128i *)to + 3, d);
  }
  memcpy(to, from, length);
}

/* Whoever reads what was streamed next, on any core, finds it written. */
static void streamed(void) { _mm_sfence(); }
#else
static void stream(char *to, const char *from, uint64_t length) {
  memcpy(to, from, length);
}
static void streamed(void) {}
#endif

/* `total` is the sum of the lengths. */
void kvwire_copy(const uint64_t *from, const uint64_t *to, const uint64_t *lengths,
                 size_t count, uint64_t total) {
  size_t i = 0;
  if (total >= STREAMED_TOTAL) {
    for (; i < count; i++) {
      if (lengths[i] >= STREAMED_PIECE)
        stream((char *)to[i], (const char *)from[i], lengths[i]);
      else
        memcpy((char *)to[i], (const char *)from[i], lengths[i]);
    }
    streamed();
  }
  for (; i < count; i++) memcpy((char *)to[i], (const char *)from[i], lengths[i]);
}

/* --- generations: kvwire/memory/generations.py has the argument --------------------- */

/* Returns how many ids lie beyond the table; their generations are not stored. */
size_t kvwire_renew(uint64_t *table, size_t entries, const uint64_t *ids,
                    const uint64_t *fresh, size_t count) {
  size_t beyond = 0;
  for (size_t i = 0; i < count; i++) {
    if (ids[i] < entries)
      __atomic_store_n(&table[ids[i]], fresh[i], __ATOMIC_RELAXED);
    else
      beyond++;
  }
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  return beyond;
}

void kvwire_same(const uint64_t *table, size_t entries, const uint64_t *ids,
                 const uint64_t *generations, size_t count, uint8_t *same) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  for (size_t i = 0; i < count; i++)
    same[i] = ids[i] < entries &&
              __atomic_load_n(&table[ids[i]], __ATOMIC_RELAXED) == generations[i];
}

/* --- reading windows: kvwire_local/blocks.py has the argument ----------------------- */

/* What all batches of a window have in common; kvwire.backend.BlockRead has the terms.
 *
 * A piece lies where it may if its address is less than `room` beyond `low`. */
struct kvwire_window {
  const uint64_t *pieces_from, *pieces_to, *low, *room;
  uint64_t pieces, run;
  uint64_t table; /* where the table of generations is, here or in the other process */
  uint64_t entries;
};

/* The last block may have fewer granules than `per_block`. */
struct batch {
  const uint64_t *offsets_from, *offsets_to;
  uint64_t granules, per_block;
  const uint64_t *entries, *generations; /* of each block */
  uint64_t blocks;
};

static uint64_t end_of(const struct batch *batch, uint64_t block) {
  uint64_t left = batch->granules / batch->per_block;
  return block < left ? (block + 1) * batch->per_block : batch->granules;
}

/* Says whether a block has an entry, and all of its pieces lie where they may. */
static int is_inside(const struct kvwire_window *window,
                     const struct batch *batch, uint64_t block) {
  uint64_t end = end_of(batch, block);
  if (batch->entries[block] >= window->entries) return 0;
  for (uint64_t g = block * batch->per_block; g < end; g++)
    for (uint64_t p = 0; p < window->pieces; p++)
      if (window->pieces_from[p] + batch->offsets_from[g] - window->low[p] >=
          window->room[p])
        return 0;
  return 1;
}

static int is_current(const struct kvwire_window *window,
                      const struct batch *batch, uint64_t block) {
  const uint64_t *table = (const uint64_t *)window->table;
  return __atomic_load_n(&table[batch->entries[block]], __ATOMIC_RELAXED) ==
         batch->generations[block];
}

void kvwire_read_mapped(const struct kvwire_window *window,
                        const uint64_t *offsets_from, const uint64_t *offsets_to,
                        uint64_t granules, uint64_t per_block, const uint64_t *entries,
                        const uint64_t *generations, uint64_t blocks, uint8_t *landed) {
  const struct batch all = {offsets_from, offsets_to,  granules, per_block,
                            entries,      generations, blocks};
  const struct batch *batch = &all;
  uint64_t run = window->run;
  uint64_t total = batch->granules * window->pieces * run;
  int past_caches = total >= STREAMED_TOTAL && run >= STREAMED_PIECE;
  for (uint64_t block = 0; block < batch->blocks; block++) {
    uint64_t end = end_of(batch, block);
    /* A generation that is not the ticket's now will not be later: save the copy. */
    landed[block] = is_inside(window, batch, block) && is_current(window, batch, block);
    if (!landed[block]) continue;
    for (uint64_t g = block * batch->per_block; g < end; g++) {
      for (uint64_t p = 0; p < window->pieces; p++) {
        char *to = (char *)(window->pieces_to[p] + batch->offsets_to[g]);
        const char *from =
            (const char *)(window->pieces_from[p] + batch->offsets_from[g]);
        if (past_caches)
          stream(to, from, run);
        else
          memcpy(to, from, run);
      }
    }
  }
  if (past_caches) streamed();
#ifndef KVWIRE_PLANTED /* a test compiles this without the second look */
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  for (uint64_t block = 0; block < batch->blocks; block++)
    if (landed[block]) landed[block] = is_current(window, batch, block);
#endif
}

#ifdef __linux__
#include <sys/types.h>
#include <sys/uio.h>

enum { IOVECS = 1024 }; /* the kernel takes no more in one call */
/* Nor more bytes than 2 GiB less a page. */
static const uint64_t CALL_BYTES = 1 << 30;

/* Bytes of another process that one call, the next, will read. */
struct gathered {
  pid_t pid;
  int apart; /* what comes next joins nothing before it */
  uint64_t bytes;
  size_t count_here, count_there;
  struct iovec here[IOVECS], there[IOVECS];
};

/* Reads what was gathered; returns 0, or the error, EFAULT if it came short. */
static int read_gathered(struct gathered *gathered) {
  ssize_t moved = 0;
  if (gathered->bytes)
    moved = process_vm_readv(gathered->pid, gathered->here, gathered->count_here,
                             gathered->there, gathered->count_there, 0);
  int error = moved < 0 ? errno : (uint64_t)moved < gathered->bytes ? EFAULT : 0;
  gathered->apart = 1;
  gathered->bytes = gathered->count_here = gathered->count_there = 0;
  return error;
}

/* Adds bytes to a list; unless apart, they may continue the ones before. */
static size_t append(struct iovec *list, size_t count, int apart, uint64_t base,
                     uint64_t length) {
  if (!apart && (uint64_t)list[count - 1].iov_base + list[count - 1].iov_len == base) {
    list[count - 1].iov_len += length;
    return count;
  }
  list[count].iov_base = (void *)base;
  list[count].iov_len = length;
  return count + 1;
}

/* Adds a piece, and reads whatever has no room beside it. */
static int gather(struct gathered *gathered, uint64_t to, uint64_t from,
                  uint64_t length) {
  while (length) {
    uint64_t part = CALL_BYTES - gathered->bytes;
    if (part > length) part = length;
    if (!part || gathered->count_here == IOVECS || gathered->count_there == IOVECS) {
      int error = read_gathered(gathered);
      if (error) return error;
      continue;
    }
    int apart = gathered->apart;
    gathered->count_here = append(gathered->here, gathered->count_here, apart, to, part);
    gathered->count_there =
        append(gathered->there, gathered->count_there, apart, from, part);
    gathered->apart = 0;
    gathered->bytes += part;
    to += part, from += part, length -= part;
  }
  return 0;
}

/* Where the other process has a cookie, and which. */
struct kvwire_process {
  uint64_t pid, address, cookie[2];
};

/* Reads the cookie as well, behind all that was gathered. */
static int read_and_identify(struct gathered *gathered,
                             const struct kvwire_process *process) {
  uint64_t cookie[2] = {0, 0};
  int error =
      gather(gathered, (uint64_t)cookie, process->address, sizeof process->cookie);
  if (!error) error = read_gathered(gathered);
  if (!error && memcmp(cookie, process->cookie, sizeof cookie)) error = ESRCH;
  return error;
}

/* Reads the blocks from `first` to before `end`: bytes, generations, cookie. */
static int read_blocks(const struct kvwire_window *window,
                       const struct batch *batch, uint64_t first, uint64_t end,
                       const struct kvwire_process *process, uint64_t *found,
                       uint8_t *landed) {
  struct gathered gathered;
  int error = 0;
  gathered.pid = (pid_t)process->pid;
  gathered.apart = 1;
  gathered.bytes = gathered.count_here = gathered.count_there = 0;
  for (uint64_t block = first; block < end; block++) {
    landed[block] = is_inside(window, batch, block);
    if (!landed[block]) continue;
    for (uint64_t g = block * batch->per_block; g < end_of(batch, block); g++)
      for (uint64_t p = 0; p < window->pieces && !error; p++)
        error = gather(&gathered, window->pieces_to[p] + batch->offsets_to[g],
                       window->pieces_from[p] + batch->offsets_from[g], window->run);
  }
#ifndef __x86_64__
  if (!error) error = read_gathered(&gathered);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
  gathered.apart = 1; /* no string instruction copies bytes and a generation */
  for (uint64_t block = first; block < end && !error; block++)
    if (landed[block])
      error = gather(&gathered, (uint64_t)&found[block],
                     window->table + sizeof(uint64_t) * batch->entries[block],
                     sizeof(uint64_t));
  if (!error) error = read_and_identify(&gathered, process);
  for (uint64_t block = first; block < end; block++) {
#ifdef KVWIRE_PLANTED
    found[block] = batch->generations[block];
#endif
    landed[block] &= !error && found[block] == batch->generations[block];
  }
  return error;
}

/* Returns 0, or the error for which the process has to be given up.
 *
 * Blocks in memory that the process no longer has are as good as withdrawn. */
int kvwire_read_process(const struct kvwire_window *window,
                        const uint64_t *offsets_from, const uint64_t *offsets_to,
                        uint64_t granules, uint64_t per_block, const uint64_t *entries,
                        const uint64_t *generations, uint64_t blocks, uint8_t *landed,
                        const struct kvwire_process *process) {
  const struct batch batch = {offsets_from, offsets_to,  granules, per_block,
                              entries,      generations, blocks};
  uint64_t *found = malloc(sizeof *found * (blocks + 1)); /* malloc(0) may fail */
  if (!found) return ENOMEM;
  int error = read_blocks(window, &batch, 0, blocks, process, found, landed);
  if (error == EFAULT) {
    for (uint64_t block = 0; block < blocks && (!error || error == EFAULT); block++)
      error = read_blocks(window, &batch, block, block + 1, process, found, landed);
    if (!error || error == EFAULT) {
      struct gathered none = {.pid = (pid_t)process->pid, .apart = 1};
      error = read_and_identify(&none, process);
    }
  }
  free(found);
  return error;
}
#endif

/* --- gets of UCX, for backends/kvwire_ucx/gets.py -------------------------------------
 *
 * A batch of a window is many gets, and each is three calls of libucp: one that posts it,
 * one that looks at its status, and one that frees its request. These loops call them by
 * the addresses that Python has from libucp. `status` keeps the first error. */

typedef void *(*kvwire_get)(void *endpoint, void *here, size_t length, uint64_t there,
                            void *key, const void *params);

enum { UCX_LAST_ERROR = -100, UCX_IN_PROGRESS = 1 };

/* Returns how many gets are not over; their requests are in `handles`. */
size_t kvwire_post_gets(kvwire_get get, void *endpoint, const uint64_t *here,
                        const uint64_t *lengths, const uint64_t *there,
                        const uint64_t *keys, const void *params, uint64_t *handles,
                        size_t count, int *status) {
  size_t left = 0;
  for (size_t i = 0; i < count; i++) {
    void *posted = get(endpoint, (void *)here[i], lengths[i], there[i], (void *)keys[i],
                       params);
    intptr_t error = (intptr_t)posted;
    if (error < 0 && error >= UCX_LAST_ERROR) {
      if (!*status) *status = (int)error;
    } else if (posted) {
      handles[left++] = (uint64_t)posted;
    }
  }
  return left;
}

/* Frees the last of `count` requests as far as they are over; returns how many stay. */
size_t kvwire_reap_gets(int8_t (*look)(void *), void (*release)(void *),
                        const uint64_t *handles, size_t count, int *status) {
  for (; count; count--) {
    void *handle = (void *)handles[count - 1];
    int8_t found = look(handle);
    if (found == UCX_IN_PROGRESS) break;
    if (found && !*status) *status = found;
    release(handle);
  }
  return count;
}

/* Calls `progress` until nothing moves, or some time is over; returns whether it still
 * moves. */
unsigned kvwire_progress(unsigned (*progress)(void *), void *worker, uint64_t budget_ns) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  uint64_t end = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec + budget_ns;
  while (progress(worker)) {
    clock_gettime(CLOCK_MONOTONIC, &now);
    if ((uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec > end) return 1;
  }
  return 0;
}
