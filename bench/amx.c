/* What Intel's matrix registers (AMX) reach from the caches, with nothing beside loads and products:
 * the bound of treadle's prompts there.
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
enum { ROUNDS = 15, RUNS = 60, MOST = 64 };

static int n_threads = 2, zeros;
static char *tokens;
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
static void blocked(char *w, char *sums) {
    enum { NEAR = 16, ASKED = 32 / STRIPS };
    for (int g = 0; g < GROUPS; g++)
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

static const struct { const char *name; void (*run)(char *, char *); } loops[] = {
    {"registers alone", registers}, {"from the first-level cache", first_level},
    {"rows as in a file, all of K", by_row}, {"blocked for the caches", blocked},
};

static int larger(const void *a, const void *b) {
    return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b);
}

static void *work(void *id) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
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
    pthread_t threads[MOST];
    pthread_barrier_init(&together, 0, n_threads);
    for (long i = 0; i < n_threads; i++) pthread_create(&threads[i], 0, work, (void *)i);
    for (int i = 0; i < n_threads; i++) pthread_join(threads[i], 0);
    return 0;
}
