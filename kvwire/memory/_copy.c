/* Copies pieces of memory, all of them in one call; and tables of generations.
 *
 * kvwire/memory/pieces.py and generations.py call this by ctypes and do the same without
 * it; nothing here knows Python. hatch_build.py compiles it where kvwire is installed.
 *
 * A store to memory that is not in a cache reads its line first. Stores past the caches
 * do not, which doubles the rate of copies that are larger than the caches: on an AMD
 * EPYC 64 MiB in pieces of 32 KiB go at 12.7 GB/s out of a KV cache and at 17.3 into
 * one, where memcpy piece by piece has 9.3 and 7.2. What is smaller stays in the caches
 * for whoever reads it next: at 1 MiB twice as fast as after stores past them.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64 };

/* Shorter pieces have hardly a whole line. */
static const uint64_t STREAMED_PIECE = 1024;
static const uint64_t STREAMED_TOTAL = 8 << 20;

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
#endif

/* `total` is the sum of the lengths. */
void kvwire_copy(const uint64_t *from, const uint64_t *to, const uint64_t *lengths,
                 size_t count, uint64_t total) {
  size_t i = 0;
#ifdef __SSE2__
  if (total >= STREAMED_TOTAL) {
    for (; i < count; i++) {
      if (lengths[i] >= STREAMED_PIECE)
        stream((char *)to[i], (const char *)from[i], lengths[i]);
      else
        memcpy((char *)to[i], (const char *)from[i], lengths[i]);
    }
    _mm_sfence(); /* whoever reads them next, on any core, finds them written */
  }
#endif
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
