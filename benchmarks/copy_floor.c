/* What a copy of runs through two tables can reach in C: `bench_kernels.py --floor` compiles it.
 *
 * Part of no package: it tells how far the numpy kernels are from a compiled loop. `plain` is one
 * memcpy a run, `streaming` writes past the cache and asks for the next run ahead of time.
 */
#include <emmintrin.h>
#include <stdint.h>
#include <string.h>

void plain(const int64_t *src_bases, const int64_t *src_offsets, const int64_t *dst_bases,
           const int64_t *dst_offsets, int64_t num_pieces, int64_t num_runs, int64_t run_nbytes)
{
    for (int64_t piece = 0; piece < num_pieces; piece++)
        for (int64_t run = 0; run < num_runs; run++)
            memcpy((char *)dst_bases[piece] + dst_offsets[run],
                   (const char *)src_bases[piece] + src_offsets[run], (size_t)run_nbytes);
}

/* Addresses at dst are multiples of 16, runs of 64 bytes. */
void streaming(const int64_t *src_bases, const int64_t *src_offsets, const int64_t *dst_bases,
               const int64_t *dst_offsets, int64_t num_pieces, int64_t num_runs,
               int64_t run_nbytes)
{
    for (int64_t piece = 0; piece < num_pieces; piece++)
        for (int64_t run = 0; run < num_runs; run++) {
            const char *src = (const char *)src_bases[piece] + src_offsets[run];
            char *dst = (char *)dst_bases[piece] + dst_offsets[run];
            int64_t later = run + 2 < num_runs ? run + 2 : run;
            const char *next = (const char *)src_bases[piece] + src_offsets[later];
            for (int64_t at = 0; at < run_nbytes; at += 64) {
                _mm_prefetch(next + at, _MM_HINT_T0);
                for (int part = 0; part < 64; part += 16)
                    _mm_stream_si128((__m128i *)(dst + at + part),
                                     _mm_loadu_si128((const __m128i *)(src + at + part)));
            }
        }
    _mm_sfence();
}
