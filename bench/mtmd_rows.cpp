// llama.cpp's media rows of given pixels or mel frames: built by bench/towers_beside.py.
//
// Usage: mtmd_rows MMPROJ image|audio, then a line for each input on stdin:
//   NX NY INPUT OUTPUT
// INPUT: f32, of a picture [NY][NX][3] as the tower's preparation leaves it, of a sound [NY][NX]
// with NY mel bins. OUTPUT: the rows, f32. Answers a line "N_ROWS WIDTH", or "0 0".
#include "clip.h"
#include "clip-impl.h"

#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

static void quiet(enum ggml_log_level, const char *, void *) {}

int main(int argc, char ** argv) {
    if (argc != 3) {
        return 2;
    }
    if (!getenv("LOUD")) ggml_log_set(quiet, nullptr);
    if (!getenv("LOUD")) mtmd_log_set(quiet, nullptr);
    clip_context_params params = {};
    params.flash_attn_type = CLIP_FLASH_ATTN_TYPE_DISABLED;
    params.image_min_tokens = params.image_max_tokens = -1;
    const clip_init_result found = clip_init(argv[1], params);
    const bool is_audio = std::string(argv[2]) == "audio";
    clip_ctx * ctx = is_audio ? found.ctx_a : found.ctx_v;
    if (!ctx) {
        std::cout << "refused" << std::endl;
        return 1;
    }
    std::cout << "ready" << std::endl;
    int nx, ny;
    std::string from, to;
    while (std::cin >> nx >> ny >> from >> to) {
        std::vector<float> values((size_t) nx * ny * (is_audio ? 1 : 3));
        std::ifstream(from, std::ios::binary).read((char *) values.data(), 4 * values.size());
        clip_image_f32 input;
        input.set_size({nx, ny}, false, is_audio);
        input.cpy_buf(values);
        clip_image_f32_batch batch;
        batch.is_audio = is_audio;
        const int n_rows = clip_n_output_tokens(ctx, &input);
        const int width = clip_n_mmproj_embd(ctx);
        batch.entries.push_back(input);
        std::vector<float> rows((size_t) n_rows * width);
        if (!clip_image_batch_encode(ctx, 1, &batch, rows)) {
            std::cout << "0 0" << std::endl;
            continue;
        }
        std::ofstream(to, std::ios::binary).write((const char *) rows.data(), 4 * rows.size());
        std::cout << n_rows << " " << rows.size() / n_rows << std::endl;
    }
}
