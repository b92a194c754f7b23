// A step of generation on the layers of one rank: every thread of the team runs the same code on its share, with a
// barrier wherever one reads what another wrote. Owns the order of operations and who does what; the arithmetic is in
// gemm.h, rows.h and attention.h. It never allocates what outlives a step and never talks to another rank.
//
// A layer is two halves, attention and feed-forward. Each ends with a product that leaves a sum in `partial`, in the
// compute type; the next half adds it to the residual stream. Ranks that share the layers add up `partial` between
// halves.
#pragma once

#include "attention.h"
#include "gemm.h"
#include "rows.h"
#include "sample.h"
#include "threads.h"

namespace hf {

// Of one layer; matrices are packed, gate and up as a pair; biases are null where there are none, as are norms of q and
// k.
struct StageLayer {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias;
    const void *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
};

struct Stage {
    int64_t dtype, num_layers, hidden, heads, kv_heads, head_dim, intermediate;
    int64_t segments;                 // of the products whose sums ranks add up
    int64_t vocab_first, vocab_rows;  // rows of `embedding` that this rank has
    int64_t num_blocks;
    double eps;
    const void* embedding;   // [vocab_rows, hidden]; null where hidden states come from another stage
    const void* final_norm;  // null where they go to another stage
    const void *cos, *sin;   // [positions, head_dim / 2]
    void *keys, *values;     // [layers, blocks, kv_heads, head_dim, 16], [layers, blocks, kv_heads, 16, head_dim]
    const StageLayer* layers;
};

// Tokens, and the room that a step works in: h, normed [tokens, hidden], qkv, seen [tokens, heads * head_dim], partial
// [tokens, hidden] in the compute type, active [tokens, intermediate], out.
struct Step {
    int64_t tokens, num_decode, samples, width;
    const int64_t* ids;
    const int32_t *positions, *slots, *tables;
    const int64_t* sampled;
    const void* x;  // [tokens, hidden] of the stage before; null where ids are looked up
    void *h, *normed, *qkv, *seen, *partial, *active, *out;
};

// A token for each sample from softmax(logits / temperature), on a rank that has the whole head.
struct Draw {
    int64_t vocab;
    double temperature;      // 0: the likeliest
    const void* head;        // packed [vocab, hidden]
    const double* uniforms;  // [samples]; not read at temperature 0
    void *logits, *blocks;   // room: [samples, vocab] in the compute type, vocab_blocks(vocab) statistics a sample
    int64_t* tokens;
    void* log_probs;
};

template <class T> class StageThread {
    using C = Compute<T>;

public:
    StageThread(Team& team, int thread, const Stage& stage, const Step& step)
        : team_(team), thread_(thread), threads_(team.size()), stage_(stage), step_(step),
          rows_(share_of(step.tokens, thread, team.size())),
          qkv_size_((stage.heads + 2 * stage.kv_heads) * stage.head_dim), next_(thread, team.size(), step.tokens) {}

    // The residual stream starts as x, or as embeddings; ids of other ranks' rows give 0. This thread's rows.
    void begin() {
        long hidden = stage_.hidden, bytes = hidden * sizeof(T);
        for (long row = rows_.first; row < rows_.last; ++row) {
            T* to = at<T>(step_.h, row, hidden);
            if (step_.x != nullptr) {
                std::memcpy((void*)to, at<T>(step_.x, row, hidden), bytes);
                continue;
            }
            long id = step_.ids[row] - stage_.vocab_first;
            if (id >= 0 && id < stage_.vocab_rows) std::memcpy((void*)to, at<T>(stage_.embedding, id, hidden), bytes);
            else std::memset((void*)to, 0, bytes);
        }
    }

    // Half 2 i is the attention of layer i, half 2 i + 1 its feed-forward. Ends with a barrier.
    void half(long index) {
        const StageLayer& layer = stage_.layers[index / 2];
        take_partial(index, index % 2 ? layer.post_norm : layer.input_norm);
        wait_before(weight_of(index));
        if (index % 2) feed_forward(layer);
        else attention(index / 2, layer);
        if (index + 1 < 2 * stage_.num_layers) wait_before(weight_of(index + 1));
        else team_.barrier();
    }

    // What leaves the stage: hidden states of all tokens, or normed ones of the sampled.
    void finish() {
        long hidden = stage_.hidden, halves = 2 * stage_.num_layers;
        const T* bias = bias_before(halves);
        bool last = stage_.final_norm != nullptr;
        Share share = last ? share_of(step_.samples, thread_, threads_) : rows_;
        std::vector<T> sum(hidden);
        for (long i = share.first; i < share.last; ++i) {
            long row = last ? step_.sampled[i] : i;
            T* to = at<T>(step_.out, i, hidden);
            residual_row(at<T>(step_.h, row, hidden), at<C>(step_.partial, row, hidden), bias, hidden,
                         last ? sum.data() : to);
            if (last) rms_norm_row(sum.data(), (const T*)stage_.final_norm, hidden, stage_.eps, to);
        }
    }

    // After `finish`.
    void draw(const Draw& draw) {
        long vocab = draw.vocab, rows = step_.samples;
        wait_before({draw.head, num_panels<T>(vocab), stage_.hidden, 1});
        C* logits = (C*)draw.logits;
        auto* blocks = (BlockStatistics<C>*)draw.blocks;
        gemm_part<T, C>(thread_, threads_, (const T*)step_.out, rows, stage_.hidden, draw.head, nullptr, vocab,
                        stage_.hidden, 1, logits, vocab);
        team_.barrier();
        statistics_part(thread_, threads_, logits, rows, vocab, vocab, draw.temperature == 0 ? 1 : draw.temperature,
                        blocks);
        team_.barrier();
        draw_part(thread_, threads_, logits, rows, vocab, vocab, draw.uniforms, draw.temperature, blocks, draw.tokens,
                  (C*)draw.log_probs);
    }

private:
    template <class E> static const E* at(const void* from, long row, long size) { return (const E*)from + row * size; }
    template <class E> static E* at(void* from, long row, long size) { return (E*)from + row * size; }

    // Of the product that ended the half before; null without one.
    const T* bias_before(long half) const {
        if (half == 0) return nullptr;
        const StageLayer& layer = stage_.layers[(half - 1) / 2];
        return (const T*)((half - 1) % 2 ? layer.down_bias : layer.out_bias);
    }

    // Of the first product of a half.
    PackedMatrix weight_of(long half) const {
        const StageLayer& layer = stage_.layers[half / 2];
        if (half % 2) return {layer.gate_up, 2 * num_panels<T>(stage_.intermediate), stage_.hidden, 2};
        return {layer.qkv, num_panels<T>(qkv_size_), stage_.hidden, 1};
    }
    PackedMatrix weight_to_hidden(const void* packed, long k) const {
        return {packed, num_panels<T>(stage_.hidden), k, 1};
    }

    // A barrier behind which that weight is the next one to be read.
    void wait_before(const PackedMatrix& weight) {
        next_.are(weight);
        team_.barrier([this] { next_.fetch_some(); });
    }

    void take_partial(long half, const void* norm) {
        long hidden = stage_.hidden;
        for (long row = rows_.first; row < rows_.last; ++row) {
            T* h = at<T>(step_.h, row, hidden);
            if (half > 0) residual_row(h, at<C>(step_.partial, row, hidden), bias_before(half), hidden, h);
            rms_norm_row(h, (const T*)norm, hidden, stage_.eps, at<T>(step_.normed, row, hidden));
        }
    }

    template <class Out>
    void product(const void* x, long k, const void* weight, const void* bias, long n, long segments, Out* y) {
        gemm_part<T, Out>(thread_, threads_, (const T*)x, step_.tokens, k, weight, (const T*)bias, n, k, int(segments),
                          y, n);
    }

    void feed_forward(const StageLayer& layer) {
        long size = stage_.intermediate;
        const T* bias = (const T*)layer.gate_up_bias;
        T* active = (T*)step_.active;
        gemm_pair_part(thread_, threads_, (const T*)step_.normed, step_.tokens, stage_.hidden, layer.gate_up, bias,
                       bias == nullptr ? nullptr : bias + size, size, stage_.hidden,
                       [=](long row, long column, long count, const T* gate, const T* up) {
            swiglu_row(gate, up, count, active + row * size + column);
        });
        wait_before(weight_to_hidden(layer.down, size));
        product(step_.active, size, layer.down, nullptr, stage_.hidden, stage_.segments, (C*)step_.partial);
    }

    void attention(long index, const StageLayer& layer) {
        const long seen = stage_.heads * stage_.head_dim;
        const PackedMatrix out = weight_to_hidden(layer.out, seen);
        product(step_.normed, stage_.hidden, layer.qkv, layer.qkv_bias, qkv_size_, 1, (T*)step_.qkv);
        wait_before(out);
        Room room(stage_);
        auto write_all = [&](long token, long count, long kv) {
            for (long i = token; i < token + count; ++i) write(index, layer, i, kv, room);
        };
        if (step_.tokens > step_.num_decode) {  // tokens of a prompt see each other
            for_my_units(write_all);
            team_.barrier();
            for_my_units([&](long token, long count, long kv) { see(index, layer, token, count, kv, room); });
        } else {
            for_my_units([&](long token, long count, long kv) {
                write_all(token, count, kv);
                see(index, layer, token, count, kv, room);
            });
        }
        wait_before(out);
        product(step_.seen, seen, layer.out, nullptr, stage_.hidden, stage_.segments, (C*)step_.partial);
    }

    // Room of a thread, kept from step to step.
    struct Room {
        explicit Room(const Stage& stage) : scratch(kept()) {
            long rows = std::max<long>(kRowsAtOnce, stage.heads / stage.kv_heads);
            queries = scratch.query_room(rows * stage.head_dim);
            head.resize(2 * stage.head_dim);
            counts.resize(rows);
            outs.resize(rows);
        }
        static AttentionScratch<C>& kept() {
            thread_local AttentionScratch<C> one;
            return one;
        }
        AttentionScratch<C>& scratch;
        C* queries;
        std::vector<T> head;
        std::vector<long> counts;
        std::vector<T*> outs;
    };

    // Calls work(first token, count, kv head) for this thread's part of all (tokens, kv head), cut where the keys that
    // are read are halved. Neighbours of a prompt come together. The same part each time.
    template <class Work> void for_my_units(Work&& work) const {
        long group = stage_.heads / stage_.kv_heads, most = std::max<long>(1, kRowsAtOnce / group);
        auto units = [&](auto&& each) {
            for (long token = 0, count; token < step_.tokens; token += count) {
                count = 1;
                if (token >= step_.num_decode)
                    while (count < most && token + count < step_.tokens && follows(token + count)) ++count;
                each(token, count, long(step_.positions[token]) + 32);
            }
        };
        long total = 0, before = 0;
        if (threads_ > 1) units([&](long, long, long cost) { total += cost * stage_.kv_heads; });
        long first = total * thread_ / threads_, last = total * (thread_ + 1) / threads_;
        units([&](long token, long count, long cost) {
            for (long kv = 0; kv < stage_.kv_heads; ++kv, before += cost)
                if (threads_ == 1 || (before >= first && before < last)) work(token, count, kv);
        });
    }
    bool follows(long token) const {
        return step_.slots[token] == step_.slots[token - 1] && step_.positions[token] == step_.positions[token - 1] + 1;
    }

    Pages<T> pages(long index, long token, long kv) const {
        long head = stage_.head_dim * kPage, block = stage_.kv_heads * head;
        long first = index * stage_.num_blocks * block + kv * head;
        return {(const T*)stage_.keys + first, (const T*)stage_.values + first,
                step_.tables + step_.slots[token] * step_.width, block};
    }

    // A head of `qkv`, normed where the model does so, and rotated, to `to`.
    void turn(long token, long head, const void* norm, Room& room, T* to) const {
        long size = stage_.head_dim, half = size / 2, position = step_.positions[token];
        const T* from = at<T>(step_.qkv, token, qkv_size_) + head * size;
        if (norm != nullptr) {
            rms_norm_row(from, (const T*)norm, size, stage_.eps, room.head.data());
            from = room.head.data();
        }
        rope_row(from, at<T>(stage_.cos, position, half), at<T>(stage_.sin, position, half), size, to);
    }

    void write(long index, const StageLayer& layer, long token, long kv, Room& room) const {
        Pages<T> to = pages(index, token, kv);
        long position = step_.positions[token], page = position / kPage, size = stage_.head_dim;
        T* key = room.head.data() + size;
        turn(token, stage_.heads + kv, layer.k_norm, room, key);
        const T* value = at<T>(step_.qkv, token, qkv_size_) + (stage_.heads + stage_.kv_heads + kv) * size;
        write_position((T*)to.key_page(page), (T*)to.value_page(page), position % kPage, key, value, size);
    }

    void see(long index, const StageLayer& layer, long token, long count, long kv, Room& room) const {
        long size = stage_.head_dim, group = stage_.heads / stage_.kv_heads, rows = count * group;
        T* turned = room.head.data() + size;
        for (long row = 0; row < rows; ++row) {
            long query = token + row / group, head = kv * group + row % group;
            turn(query, head, layer.q_norm, room, turned);
            for (long i = 0; i < size; ++i) room.queries[row * size + i] = widen(turned[i]);
            room.counts[row] = step_.positions[query] + 1;
            room.outs[row] = at<T>(step_.seen, query, stage_.heads * size) + head * size;
        }
        attend(pages(index, token, kv), rows, room.queries, room.counts.data(), size, room.outs.data(), room.scratch);
    }

    Team& team_;
    const int thread_, threads_;
    const Stage& stage_;
    const Step& step_;
    const Share rows_;
    const long qkv_size_;
    NextWeights<T> next_;
};

}  // namespace hf
