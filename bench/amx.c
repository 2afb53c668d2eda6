/* What Intel's matrix registers (AMX) reach from the caches: the bound of treadle's prompts there. The
 * first loops have nothing beside loads and products; the last two do what a product of a model does.
 *
 *     gcc -O2 -march=sapphirerapids -pthread bench/amx.c -o amx && ./amx [threads] [zeros]
 *
 * 256 rows of bf16 weights and 512 tokens, K = 2048, 32 rows by 32 tokens at a time. Each loop prints
 * TFLOP/s of every thread, the median of its rounds. Weights and tokens are random numbers; with
 * `zeros` they are zeros, of which the same instructions use less power: the clock stays higher.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 256, K = 2048, TOKENS = 512, STEPS = K / 32, STRIPS = ROWS / 32, GROUPS = TOKENS / 32 };
enum { STEP = 2048, PITCH = STEP + 64, STRIP = STEPS * PITCH, GROUP = STEPS * STEP, SUMS = 4096 };
enum { STRIDE = 2048 * 4, BLOCK = 34, FILE_BYTES = BLOCK * (20 << 20) };
enum { ROUNDS = 15, RUNS = 60, MOST = 64 };

static int n_threads = 2, zeros;
static char *tokens, *tokens_out; /* bf16 in groups; f32, STRIDE bytes a token */
static char *file;                /* weights in Q8_0, read round and round */
static __thread size_t n_read;
static __thread int next_panel;
static pthread_barrier_t together;
static double rates[MOST];

/* All zeros or random numbers of about 1, in huge pages where there are some. */
static char *memory(size_t n) {
    char *p = mmap(0, n + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    p = (char *)(((uintptr_t)p + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
    madvise(p, n, MADV_HUGEPAGE);
    uint32_t state = 1;
    for (size_t i = 0; i < n / 2; i++) {
        state = state * 1664525u + 1013904223u;
        ((uint16_t *)p)[i] = zeros ? 0 : 0x3f00 + (state >> 24) + (state >> 8 & 0x8000);
    }
    return p;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

#define DOTS                    \
    _tile_dpbf16ps(0, 4, 6);    \
    _tile_dpbf16ps(1, 4, 7);    \
    _tile_dpbf16ps(2, 5, 6);    \
    _tile_dpbf16ps(3, 5, 7);

static void zero(void) { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }

static void load_sums(char *c) {
    _tile_loadd(0, c, 64); _tile_loadd(1, c + 1024, 64);
    _tile_loadd(2, c + 2048, 64); _tile_loadd(3, c + 3072, 64);
}

static void store_sums(char *c) {
    _tile_stored(0, c, 64); _tile_stored(1, c + 1024, 64);
    _tile_stored(2, c + 2048, 64); _tile_stored(3, c + 3072, 64);
}

/* Registers alone: nothing is loaded. */
static void registers(char *w, char *sums) {
    for (int n = 0; n < GROUPS * STRIPS * STEPS; n++) { DOTS }
}

/* The same 16 KB of weights and of tokens, from the first-level cache. */
static void first_level(char *w, char *sums) {
    for (int n = 0; n < GROUPS * STRIPS * STEPS; n++) {
        char *a = w + n % 8 * PITCH, *x = tokens + n % 8 * STEP;
        _tile_loadd(4, a, 64); _tile_loadd(6, x, 128); _tile_loadd(5, a + 1024, 64); _tile_loadd(7, x + 64, 128);
        DOTS
    }
}

/* Weights row by row as in a file, all of K at once: every group of tokens comes again for each strip. */
static void by_row(char *w, char *sums) {
    enum { ROW = K * 2 + 64 };
    for (int g = 0; g < GROUPS; g++)
        for (int s = 0; s < STRIPS; s++) {
            zero();
            for (int b = 0; b < STEPS; b++) {
                char *a = w + s * 32 * ROW + b * 64, *x = tokens + g * GROUP + b * STEP;
                _tile_loadd(4, a, ROW); _tile_loadd(6, x, 128);
                _tile_loadd(5, a + 16 * ROW, ROW); _tile_loadd(7, x + 64, 128);
                DOTS
            }
            store_sums(sums + s * SUMS);
        }
}

/* As treadle's: weights in the order of the loads, 512 values of K at a time, so that a group's tokens
 * stay in the first-level cache while all strips pass; the next ones are brought into the second. */
static void multiply_group(char *w, char *sums, int g) {
    enum { NEAR = 16, ASKED = 32 / STRIPS };
    for (int first = 0; first < STEPS; first += NEAR)
        for (int s = 0; s < STRIPS; s++) {
            char *x = tokens + g * GROUP + first * STEP, *soon = x + NEAR * STEP + s * ASKED * 64;
            if (first) load_sums(sums + s * SUMS); else zero();
            for (int b = 0; b < NEAR; b++) {
                char *a = w + s * STRIP + (first + b) * PITCH;
                _tile_stream_loadd(4, a, 64); _tile_loadd(6, x + b * STEP, 128);
                _tile_stream_loadd(5, a + 1024, 64); _tile_loadd(7, x + b * STEP + 64, 128);
                for (int i = 0; i < ASKED; i++) _mm_prefetch(soon + b * STEP + i * 64, _MM_HINT_T1);
                DOTS
            }
            store_sums(sums + s * SUMS);
        }
}

static void blocked(char *w, char *sums) {
    for (int g = 0; g < GROUPS; g++) multiply_group(w, sums, g);
}

/* Adds the sums of 16 rows for four tokens to y, one row for each token, STRIDE bytes apart. */
static inline __attribute__((always_inline)) void add_four(const float *sums, char *y) {
    __m512 v[4];
    for (int i = 0; i < 4; i++) { /* rows i, i + 4, i + 8, i + 12: four tokens of each */
        v[i] = _mm512_castps128_ps512(_mm_load_ps(sums + i * 16));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, _mm_load_ps(sums + (i + 4) * 16));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, _mm_load_ps(sums + (i + 8) * 16));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, _mm_load_ps(sums + (i + 12) * 16));
    }
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1]));
    __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));
    __m512d out[4] = {_mm512_unpacklo_pd(a, c), _mm512_unpackhi_pd(a, c), _mm512_unpacklo_pd(b, d), _mm512_unpackhi_pd(b, d)};
    for (int i = 0; i < 4; i++) {
        float *to = (float *)(y + i * STRIDE);
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_castpd_ps(out[i]), _mm512_loadu_ps(to)));
    }
}

/* Blocked, with a panel's sums added to its 256 columns of the tokens' rows, as the last products of
 * attention and of a feed-forward layer do. */
static void added(char *w, char *sums) {
    next_panel = (next_panel + n_threads) % (STRIDE / 4 / ROWS);
    for (int g = 0; g < GROUPS; g++) {
        multiply_group(w, sums, g);
        char *y = tokens_out + (size_t)g * 32 * STRIDE + next_panel * ROWS * 4;
        for (int s = 0; s < STRIPS; s++)
            for (int m = 0; m < 2; m++)
                for (int t = 0; t < 32; t += 4) {
                    const float *at = (float *)(sums + s * SUMS) + (2 * m + t / 16) * 256 + t % 16;
                    add_four(at, y + t * STRIDE + (s * 32 + m * 16) * 4);
                }
    }
}

/* The same, of weights that are unpacked from Q8_0 first, as every product of a prompt does. */
static void unpacked(char *w, char *sums) {
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < STEPS; b++) {
            const char *block = file + n_read;
            _mm_prefetch(block + 1024, _MM_HINT_T0);
            n_read = (n_read + BLOCK) % FILE_BYTES;
            __m512 d = _mm512_set1_ps(_cvtsh_ss(*(const uint16_t *)block));
            __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 2))));
            __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 18))));
            __m512bh both = _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, d), _mm512_mul_ps(low, d));
            _mm512_store_si512(w + r / 32 * STRIP + b * PITCH + r % 32 * 64, (__m512i)both);
        }
    added(w, sums);
}

static const struct { const char *name; void (*run)(char *, char *); } loops[] = {
    {"registers alone", registers}, {"from the first-level cache", first_level},
    {"rows as in a file, all of K", by_row}, {"blocked for the caches", blocked},
    {"and sums added to f32 rows", added}, {"and weights from Q8_0", unpacked},
};

static int larger(const void *a, const void *b) {
    return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b);
}

static void *work(void *id) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
    next_panel = (int)(long)id;
    n_read = FILE_BYTES / MOST / BLOCK * BLOCK * (size_t)(long)id;
    char *w = memory((size_t)STRIPS * STRIP + ROWS * (K * 2 + 64)), *sums = memory(STRIPS * SUMS);
    double times[ROUNDS];
    for (size_t l = 0; l < sizeof loops / sizeof *loops; l++) {
        for (int r = 0; r < ROUNDS; r++) {
            pthread_barrier_wait(&together);
            zero();
            double start = now();
            for (int i = 0; i < RUNS; i++) loops[l].run(w, sums);
            times[r] = now() - start;
        }
        qsort(times, ROUNDS, sizeof *times, larger);
        rates[(long)id] = 2e-12 * ROWS * K * TOKENS * RUNS / times[ROUNDS / 2];
        pthread_barrier_wait(&together);
        if (!id) {
            printf("%-28s", loops[l].name);
            for (int i = 0; i < n_threads; i++) printf(" %5.2f", rates[i]);
            puts(" TFLOP/s");
        }
    }
    _tile_release();
    return 0;
}

int main(int n, char **words) {
    if (n > 1) n_threads = atoi(words[1]);
    zeros = n > 2 && !strcmp(words[2], "zeros");
    if (n_threads < 1 || n_threads > MOST || syscall(SYS_arch_prctl, 0x1023, 18)) {
        fputs("amx: 1 to 64 threads, on Linux, on a CPU with AMX\n", stderr);
        return 2;
    }
    tokens = memory((size_t)GROUPS * GROUP + (1 << 20));
    tokens_out = memory(TOKENS * STRIDE);
    memset(tokens_out, 0, TOKENS * STRIDE);
    file = memory(FILE_BYTES + 4096);
    pthread_t threads[MOST];
    pthread_barrier_init(&together, 0, n_threads);
    for (long i = 0; i < n_threads; i++) pthread_create(&threads[i], 0, work, (void *)i);
    for (int i = 0; i < n_threads; i++) pthread_join(threads[i], 0);
    return 0;
}
