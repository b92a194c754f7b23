// C entry points of a stage. Structures are those of stage.h; no arithmetic here.
#include "dispatch.h"
#include "stage.h"
#include "team.h"

using namespace hf;

#pragma GCC visibility push(default)
extern "C" {

// Halves [first, last) of the stage's layers; before them the start of the residual stream if `begins`, after them what
// leaves the stage if `ends`.
void hf_stage(const Stage* stage, const Step* step, long first, long last, int begins, int ends) {
    with_dtype(int(stage->dtype), [&]<class T>(T) {
        Team& all = team();
        all.run([&](int thread) {
            StageThread<T> mine(all, thread, *stage, *step);
            if (begins) mine.begin();
            for (long half = first; half < last; ++half) mine.half(half);
            if (ends) mine.finish();
        });
    });
}

// All of a step where one rank has the whole model: layers, head, and the tokens.
void hf_stage_and_draw(const Stage* stage, const Step* step, const Draw* draw) {
    with_dtype(int(stage->dtype), [&]<class T>(T) {
        Team& all = team();
        all.run([&](int thread) {
            StageThread<T> mine(all, thread, *stage, *step);
            mine.begin();
            for (long half = 0; half < 2 * stage->num_layers; ++half) mine.half(half);
            mine.finish();
            mine.draw(*draw);
        });
    });
}

// Bytes of the statistics that `Draw::blocks` has for a sample.
long hf_statistics_bytes(int dtype, long vocab) {
    return vocab_blocks(vocab) * (Dtype(dtype) == Dtype::Float64 ? sizeof(BlockStatistics<double>)
                                                                 : sizeof(BlockStatistics<float>));
}

// Block `pairs[2 i + 1]` of every layer becomes a copy of block `pairs[2 i]`.
void hf_copy_blocks(const Stage* stage, const int64_t* pairs, long count, long number_bytes) {
    long block = stage->kv_heads * stage->head_dim * kPage * number_bytes;
    for (void* pages : {stage->keys, stage->values})
        for (long layer = 0; layer < stage->num_layers; ++layer) {
            char* first = (char*)pages + layer * stage->num_blocks * block;
            for (long i = 0; i < count; ++i)
                std::memcpy(first + pairs[2 * i + 1] * block, first + pairs[2 * i] * block, block);
        }
}

}  // extern "C"
#pragma GCC visibility pop
