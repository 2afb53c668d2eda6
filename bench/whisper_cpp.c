// whisper.cpp beside treadle: bench/transcribe.py compiles and runs this.
//
//   cc -O2 -Isrc/include -Isrc/ggml/include whisper_cpp.c -Lbuild/bin -Wl,-rpath,build/bin -lwhisper
//   ./a.out MODEL SAMPLES THREADS BEAMS
//
// SAMPLES are f32 at 16 kHz. Prints a line "ready"; for each line of its input it transcribes, and
// prints a JSON list of seconds, processor seconds and the text.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "whisper.h"

static void ignore(enum ggml_log_level level, const char *text, void *data) {}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + 1e-9 * at.tv_nsec;
}

static float *read_samples(const char *path, int *n) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) return NULL;
    long bytes = ftell(file);
    float *samples = malloc(bytes);
    rewind(file);
    *n = (int)fread(samples, sizeof(float), bytes / sizeof(float), file);
    fclose(file);
    return samples;
}

static void print_escaped(const char *text) {
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        if ((unsigned char)*text >= 32) putchar(*text);
    }
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    int n = 0, beams = atoi(argv[4]);
    whisper_log_set(ignore, NULL);
    float *samples = read_samples(argv[2], &n);
    struct whisper_context *model =
        whisper_init_from_file_with_params(argv[1], whisper_context_default_params());
    if (!samples || !model) return 1;
    struct whisper_full_params params = whisper_full_default_params(
        beams > 1 ? WHISPER_SAMPLING_BEAM_SEARCH : WHISPER_SAMPLING_GREEDY);
    params.n_threads = atoi(argv[3]);
    params.language = "en";
    params.beam_search.beam_size = beams;
    params.print_progress = params.print_realtime = params.print_timestamps = false;
    puts("\"ready\"");
    fflush(stdout);
    char line[4096];
    while (fgets(line, sizeof line, stdin)) {
        double began = now();
        clock_t used = clock();
        if (whisper_full(model, params, samples, n)) return 1;
        double spent = (double)(clock() - used) / CLOCKS_PER_SEC;
        printf("[%.6f, %.6f, \"", now() - began, spent);
        for (int i = 0; i < whisper_full_n_segments(model); i++)
            print_escaped(whisper_full_get_segment_text(model, i));
        puts("\"]");
        fflush(stdout);
    }
    return 0;
}
