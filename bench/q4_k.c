/* What two or more threads reach of memory's speed while they multiply Q4_K by one token with AVX2:
 * the bound of treadle's text there.
 *
 *     gcc -O3 -mavx2 -mfma -mf16c -pthread bench/q4_k.c -o q4_k && ./q4_k [threads]
 *
 * The arithmetic is less than treadle's: activations have one scale for 256 values, where treadle has
 * one for 32, so that a block stays in whole numbers to its end. Rows of 2048 values; each thread has
 * a share of them, one row at a time or four of them, a quarter of its share apart. In turns with a
 * loop that only loads; GB/s of all threads, the median of the rounds and the best, and the time for
 * 256 weights where they come from the cache. The first rows are held against plain C.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { K = 2048, BLOCK = 256, BYTES = 144, BLOCKS = K / BLOCK, ROW = BLOCKS * BYTES, LINE = 64 };
enum { ROWS = 1 << 18, CACHED = 64, ROUNDS = 21, RUNS = 4, MOST = 64 };

/* Codes, sums of 16 of them, and the scale. */
typedef struct { int8_t q[BLOCK]; int16_t sums[16]; float d, none[7]; } Tokens;

static int n_threads = 2;
static uint8_t *weights;
static Tokens x[BLOCKS] __attribute__((aligned(LINE)));
static float *y;
static pthread_barrier_t together;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static float half(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

/* Eight scales and eight minimums of six bits, as bytes. */
static inline __m128i scales_of(const uint8_t *p) {
    uint32_t a, b, c;
    memcpy(&a, p, 4), memcpy(&b, p + 4, 4), memcpy(&c, p + 8, 4);
    return _mm_set_epi32((c >> 4 & 0x0f0f0f0f) | (b >> 6 & 0x03030303) << 4, b & 0x3f3f3f3f,
                         (c & 0x0f0f0f0f) | (a >> 6 & 0x03030303) << 4, a & 0x3f3f3f3f);
}

/* One block of a row: sums += d (codes . x), offs += dmin (minimums . x). */
static inline void block(const uint8_t *w, const Tokens *t, __m256 *sums, __m128 *offs, int ahead) {
    static const uint8_t pick[8][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}};
    const __m256i low = _mm256_set1_epi8(15);
    if (ahead)
        for (int i = 0; i < BYTES; i += LINE) _mm_prefetch((const char *)w + ahead + i, _MM_HINT_T0);
    __m256i both = _mm256_cvtepu8_epi16(scales_of(w + 4)), total = _mm256_setzero_si256();
    __m128i steps = _mm256_castsi256_si128(both), least = _mm256_extracti128_si256(both, 1);
    __m256i twice = _mm256_broadcastsi128_si256(steps);
    for (int i = 0; i < 4; i++) {
        __m256i codes = _mm256_loadu_si256((const __m256i *)(w + 16 + 32 * i));
        __m256i a = _mm256_and_si256(codes, low), b = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
        a = _mm256_maddubs_epi16(a, _mm256_load_si256((const __m256i *)(t->q + 64 * i)));
        b = _mm256_maddubs_epi16(b, _mm256_load_si256((const __m256i *)(t->q + 64 * i + 32)));
        __m256i at_a = _mm256_set1_epi16(pick[2 * i][0] | pick[2 * i][1] << 8);
        __m256i at_b = _mm256_set1_epi16(pick[2 * i + 1][0] | pick[2 * i + 1][1] << 8);
        a = _mm256_madd_epi16(a, _mm256_shuffle_epi8(twice, at_a));
        b = _mm256_madd_epi16(b, _mm256_shuffle_epi8(twice, at_b));
        total = _mm256_add_epi32(total, _mm256_add_epi32(a, b));
    }
    *sums = _mm256_fmadd_ps(_mm256_set1_ps(half(w) * t->d), _mm256_cvtepi32_ps(total), *sums);
    __m128i eight = _mm_hadd_epi16(_mm_load_si128((const __m128i *)t->sums), _mm_load_si128((const __m128i *)t->sums + 1));
    __m128 off = _mm_cvtepi32_ps(_mm_madd_epi16(least, eight));
    *offs = _mm_fmadd_ps(_mm_set1_ps(half(w + 2) * t->d), off, *offs);
}

static inline float total(__m256 sums, __m128 offs) {
    __m128 v = _mm_sub_ps(_mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)), offs);
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

static inline void multiply(long first, long end, long apart, int n, int ahead) {
    for (long row = first; row < end; row++) {
        __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
        __m128 offs[4] = {_mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps()};
        for (int b = 0; b < BLOCKS; b++)
            for (int i = 0; i < n; i++)
                block(weights + (row + i * apart) * ROW + b * BYTES, x + b, sums + i, offs + i, ahead);
        for (int i = 0; i < n; i++) y[row + i * apart] = total(sums[i], offs[i]);
    }
}

static void load(long first, long end) {
    __m256i all = _mm256_setzero_si256(), *p = (__m256i *)(weights + first * ROW);
    for (long i = 0; i < (end - first) * ROW / 32; i += 4) {
        all = _mm256_or_si256(all, _mm256_or_si256(p[i], p[i + 1]));
        all = _mm256_or_si256(all, _mm256_or_si256(p[i + 2], p[i + 3]));
    }
    y[first] = _mm256_extract_epi32(all, 0);
}

#define ONE(AHEAD) static void one_##AHEAD(long a, long b) { multiply(a, b, 0, 1, AHEAD); }
#define FOUR(AHEAD) \
    static void four_##AHEAD(long a, long b) { multiply(a, a + (b - a) / 4, (b - a) / 4, 4, AHEAD); }
ONE(0) ONE(1024) ONE(2048) ONE(4096) ONE(8192)
FOUR(0) FOUR(512) FOUR(1024) FOUR(2048) FOUR(4096)

static const struct { const char *name; void (*run)(long, long); } loops[] = {
    {"loads alone", load},
    {"one row", one_0}, {"one row, 1 KB ahead", one_1024}, {"one row, 2 KB ahead", one_2048},
    {"one row, 4 KB ahead", one_4096}, {"one row, 8 KB ahead", one_8192},
    {"four rows", four_0}, {"four rows, 512 bytes ahead", four_512}, {"four rows, 1 KB ahead", four_1024},
    {"four rows, 2 KB ahead", four_2048}, {"four rows, 4 KB ahead", four_4096},
};
enum { LOOPS = sizeof loops / sizeof *loops };
static double times[LOOPS][ROUNDS], cached[2][ROUNDS];

static void *work(void *id) {
    long n = ROWS / n_threads / 4 * 4, first = (long)id * n;
    for (int r = 0; r < ROUNDS; r++)
        for (int l = 0; l < LOOPS; l++) {
            pthread_barrier_wait(&together);
            double start = now();
            loops[l].run(first, first + n);
            pthread_barrier_wait(&together);
            if (!id) times[l][r] = now() - start;
        }
    for (int r = 0; r < ROUNDS; r++)
        for (int l = 0; l < 2; l++) {
            pthread_barrier_wait(&together);
            double start = now();
            for (int i = 0; i < 1000; i++) (l ? four_0 : one_0)(first, first + CACHED);
            if (!id) cached[l][r] = now() - start;
        }
    return 0;
}

static int larger(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

/* Rows in plain C. */
static int is_right(void) {
    for (int row = 0; row < 100; row++) {
        double sum = 0, size = 0;
        for (int b = 0; b < BLOCKS; b++) {
            const uint8_t *w = weights + row * ROW + b * BYTES;
            for (int j = 0; j < BLOCK; j++) {
                const uint8_t *s = w + 4;
                int i = j / 32, code = w[16 + j / 64 * 32 + j % 32] >> 4 * (j / 32 % 2) & 15;
                int step = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
                int min = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | s[i] >> 6 << 4;
                double weight = (double)half(w) * step * code - (double)half(w + 2) * min;
                sum += weight * x[b].d * x[b].q[j], size += fabs(weight * x[b].d * x[b].q[j]);
            }
        }
        if (fabs(sum - y[row]) > 1e-5 * size) return 0;
    }
    return 1;
}

int main(int n, char **words) {
    if (n > 1) n_threads = atoi(words[1]);
    if (n_threads < 1 || n_threads > MOST) {
        fputs("q4_k: 1 to 64 threads\n", stderr);
        return 2;
    }
    weights = mmap(0, (size_t)ROWS * ROW + (1 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(weights, (size_t)ROWS * ROW, MADV_HUGEPAGE);
    y = calloc(ROWS, sizeof *y);
    uint32_t state = 1;
    for (size_t i = 0; i < (size_t)ROWS * ROW; i++) {
        state = state * 1664525u + 1013904223u;
        weights[i] = state >> 24;
    }
    for (size_t i = 0; i < (size_t)ROWS * BLOCKS; i++) {  /* scales that are numbers */
        uint16_t own[2] = {0x2000 + (i & 0x3ff), 0x2400 + (i & 0x3ff)};
        memcpy(weights + i * BYTES, own, 4);
    }
    for (int b = 0; b < BLOCKS; b++) {
        x[b].d = 0.01f * (b + 1);
        for (int j = 0; j < BLOCK; j++) {
            x[b].q[j] = (int)((state = state * 1664525u + 1013904223u) >> 24) % 255 - 127;
            x[b].sums[j / 16] += x[b].q[j];
        }
    }
    four_2048(0, 400), one_0(0, 100);
    if (!is_right()) {
        fputs("q4_k: a row is wrong\n", stderr);
        return 1;
    }
    pthread_t threads[MOST];
    pthread_barrier_init(&together, 0, n_threads);
    for (long i = 0; i < n_threads; i++) pthread_create(&threads[i], 0, work, (void *)i);
    for (int i = 0; i < n_threads; i++) pthread_join(threads[i], 0);
    double bytes = (double)(ROWS / n_threads / 4 * 4) * n_threads * ROW, stream = 0;
    for (int l = 0; l < LOOPS; l++) {
        double shares[ROUNDS];
        for (int r = 0; r < ROUNDS; r++) shares[r] = times[0][r] / times[l][r];
        double all[ROUNDS];
        memcpy(all, times[l], sizeof all);
        qsort(all, ROUNDS, sizeof *all, larger), qsort(shares, ROUNDS, sizeof *shares, larger);
        stream = bytes / all[ROUNDS / 2] * 1e-9;
        printf("%-28s %5.1f GB/s, best %5.1f, %4.0f %% of loads in the same round\n", loops[l].name,
               stream, bytes / all[0] * 1e-9, 100 * shares[ROUNDS / 2]);
    }
    for (int l = 0; l < 2; l++) {
        qsort(cached[l], ROUNDS, sizeof **cached, larger);
        printf("%-28s %5.2f ns for 256 weights from the cache, best %5.2f\n", l ? "four rows" : "one row",
               cached[l][ROUNDS / 2] / (1000.0 * CACHED * BLOCKS) * 1e9,
               cached[l][0] / (1000.0 * CACHED * BLOCKS) * 1e9);
    }
    return 0;
}
