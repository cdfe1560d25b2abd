/* What training does between matrix products, and a whole decode step: on a CPU, in float32, without a copy, a mask or
   padding.

   Plain loops, which compilers turn into vector instructions where sums may be taken in any order (-ffast-math). */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* A function for every processor, and the same compiled for those with AVX2, which nearly all x86 ones are. */
#ifdef __x86_64__
#define EXPORT(name, parameters, arguments)                                                        \
    __attribute__((target("avx2,fma"))) static void name##_avx2 parameters { name arguments; }     \
    void veritune_##name parameters {                                                              \
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) name##_avx2 arguments; \
        else name arguments;                                                                       \
    }
#else
#define EXPORT(name, parameters, arguments) \
    void veritune_##name parameters { name arguments; }
#endif

/* A size that the compiler knows takes a third less time. */
#define WITH_SIZE(size, function, first, ...)               \
    switch (size) {                                         \
        case 32: function(first, 32, __VA_ARGS__); break;   \
        case 64: function(first, 64, __VA_ARGS__); break;   \
        case 128: function(first, 128, __VA_ARGS__); break; \
        default: function(first, size, __VA_ARGS__);        \
    }

/* e^x within 2e-7 of its value for x from -87 to 87, and at the nearer of these beyond: two to the nearest whole power,
   and a polynomial for the rest (Cephes). */
INLINE float exponential(float x) {
    x = x < -87 ? -87 : x > 87 ? 87 : x;
    float power = rintf(x * 1.44269504f);
    float rest = (x - power * 0.693359375f) + power * 2.12194440e-4f; /* ln 2 in two parts */
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1;
    int32_t bits = ((int32_t)power + 127) << 23;
    float two_to_power;
    memcpy(&two_to_power, &bits, sizeof bits);
    return sum * two_to_power;
}

struct Norm {
    int64_t size;
    float epsilon;
    const float *hidden, *weight; /* (rows, size), (size,) */
    float *normed;                /* (rows, size), as are the others */
    const float *grad_output;     /* by what is normed */
    float *grad_hidden;
};

/* 1 / sqrt(mean(x^2) + epsilon) */
INLINE float scale_of(const float *restrict hidden, int64_t size, float epsilon) {
    float squares = 0;
    for (int64_t d = 0; d < size; d++) squares += hidden[d] * hidden[d];
    return 1 / sqrtf(squares / size + epsilon);
}

/* weight * x / sqrt(mean(x^2) + epsilon). `normed` may be `hidden`. */
INLINE void norm_vector(const float *hidden, const float *restrict weight, int64_t size, float epsilon, float *normed) {
    float scale = scale_of(hidden, size, epsilon);
#pragma GCC ivdep
    for (int64_t d = 0; d < size; d++) normed[d] = hidden[d] * scale * weight[d];
}

/* A row at a time. */
INLINE void rms_norm(const struct Norm *norm, int64_t begin, int64_t end) {
    for (int64_t row = begin, size = norm->size; row < end; row++)
        norm_vector(norm->hidden + row * size, norm->weight, size, norm->epsilon, norm->normed + row * size);
}
EXPORT(rms_norm, (const struct Norm *norm, int64_t begin, int64_t end), (norm, begin, end))

/* Its gradients; grad_weight (size,) is that of these rows alone. */
INLINE void rms_norm_backward(const struct Norm *norm, int64_t begin, int64_t end, float *restrict grad_weight) {
    int64_t size = norm->size;
    const float *restrict weight = norm->weight;
    memset(grad_weight, 0, size * sizeof(float));
    for (int64_t row = begin; row < end; row++) {
        const float *restrict hidden = norm->hidden + row * size, *restrict grad_output = norm->grad_output + row * size;
        float *restrict grad_hidden = norm->grad_hidden + row * size;
        float scale = scale_of(hidden, size, norm->epsilon), along = 0;
        for (int64_t d = 0; d < size; d++) along += grad_output[d] * weight[d] * hidden[d];
        along *= scale * scale / size;
        for (int64_t d = 0; d < size; d++) {
            grad_hidden[d] = scale * (grad_output[d] * weight[d] - along * hidden[d]);
            grad_weight[d] += grad_output[d] * hidden[d] * scale;
        }
    }
}
EXPORT(
    rms_norm_backward,
    (const struct Norm *norm, int64_t begin, int64_t end, float *grad_weight),
    (norm, begin, end, grad_weight)
)

struct Gated {
    float *gate, *up; /* (numbers,), as are the others */
    float *product;
    const float *grad_output; /* by the product */
};

/* gate / (1 + e^-gate) * up. */
INLINE void multiply(const float *restrict gate, const float *restrict up, int64_t count, float *restrict product) {
    for (int64_t d = 0; d < count; d++) product[d] = gate[d] / (1 + exponential(-gate[d])) * up[d];
}

INLINE void swiglu(const struct Gated *gated, int64_t begin, int64_t end) {
    multiply(gated->gate + begin, gated->up + begin, end - begin, gated->product + begin);
}
EXPORT(swiglu, (const struct Gated *gated, int64_t begin, int64_t end), (gated, begin, end))

/* Its gradients by gate and up, which take their places. */
INLINE void swiglu_backward(const struct Gated *gated, int64_t begin, int64_t end) {
    float *gate = gated->gate, *up = gated->up;
    const float *grad_output = gated->grad_output;
#pragma GCC ivdep
    for (int64_t d = begin; d < end; d++) {
        float sigmoid = 1 / (1 + exponential(-gate[d])), silu = gate[d] * sigmoid, factor = up[d];
        up[d] = grad_output[d] * silu;
        gate[d] = grad_output[d] * factor * (sigmoid + silu * (1 - sigmoid));
    }
}
EXPORT(swiglu_backward, (const struct Gated *gated, int64_t begin, int64_t end), (gated, begin, end))

/* Rotary positions: the sine has its sign changed in the first half already. `rotated` may be `vector`. */
INLINE void rotate(const float *vector, const float *cosine, const float *sine, int64_t size, float *rotated) {
    int64_t half = size / 2;
#pragma GCC ivdep
    for (int64_t d = 0; d < half; d++) {
        float first = vector[d], second = vector[half + d];
        rotated[d] = first * cosine[d] + second * sine[d];
        rotated[half + d] = second * cosine[half + d] + first * sine[half + d];
    }
}

struct Rotary {
    int64_t heads, size;
    float *vectors;             /* (tokens, heads, size) */
    const float *cosine, *sine; /* (tokens, size) */
};

/* In their place. */
INLINE void rotate_tokens(const struct Rotary *rotary, int64_t begin, int64_t end) {
    int64_t heads = rotary->heads, size = rotary->size;
    for (int64_t token = begin; token < end; token++) {
        const float *cosine = rotary->cosine + token * size, *sine = rotary->sine + token * size;
        for (int64_t head = 0; head < heads; head++) {
            float *vector = rotary->vectors + (token * heads + head) * size;
            rotate(vector, cosine, sine, size, vector);
        }
    }
}
EXPORT(rotate_tokens, (const struct Rotary *rotary, int64_t begin, int64_t end), (rotary, begin, end))

/* scores[j] = scale * query . keys[j], for `count` keys, each `stride` after the one before. */
INLINE void score(
    const float *restrict query, const float *restrict keys, int64_t count, int64_t stride, int64_t size, float scale,
    float *restrict scores
) {
    for (int64_t j = 0; j < count; j++) {
        float sum = 0;
        for (int64_t d = 0; d < size; d++) sum += query[d] * keys[j * stride + d];
        scores[j] = sum * scale;
    }
}

/* e^(scores - highest) in the place of the scores; returns their sum, and the highest. */
INLINE float exponentials(float *scores, int64_t count, float *highest) {
    float most = scores[0], total = 0;
    for (int64_t j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
    for (int64_t j = 0; j < count; j++) scores[j] = exponential(scores[j] - most);
    for (int64_t j = 0; j < count; j++) total += scores[j];
    *highest = most;
    return total;
}

/* sum += weights[j] * values[j], over j. */
INLINE void mix(
    const float *restrict weights, const float *restrict values, int64_t count, int64_t stride, int64_t size,
    float *restrict sum
) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = 0; d < size; d++) sum[d] += weights[j] * values[j * stride + d];
}

/* sums[j] += weights[j] * vector, for each j. */
INLINE void spread(
    const float *restrict weights, const float *restrict vector, int64_t count, int64_t stride, int64_t size,
    float *restrict sums
) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = 0; d < size; d++) sums[j * stride + d] += weights[j] * vector[d];
}

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

/* out += vectors @ panel, for `rows` rows, a compile-time constant of at most 6: so many pairs of registers hold sums. */
INLINE void add_block(
    int rows, const float *restrict vectors, int64_t stride, int64_t depth, const float *restrict panel,
    float *restrict out, int64_t columns
) {
    Eight left[6], right[6];
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        left[row] = *(const Eight *)(out + row * columns);
        right[row] = *(const Eight *)(out + row * columns + 8);
    }
    for (int64_t k = 0; k < depth; k++) {
        Eight first = *(const Eight *)(panel + 16 * k), second = *(const Eight *)(panel + 16 * k + 8);
        __builtin_prefetch(panel + 16 * k + 512);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            left[row] += vectors[row * stride + k] * first;
            right[row] += vectors[row * stride + k] * second;
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) {
        *(Eight *)(out + row * columns) = left[row];
        *(Eight *)(out + row * columns + 8) = right[row];
    }
}

/* out += vectors @ matrix: `vectors` are (rows, depth), each `stride` after the one before, `out` (rows, columns). The
   matrix consists of panels of 16 columns, each (depth, 16), of which a part that fits the first cache meets all rows. */
INLINE void add_product(
    const float *vectors, int64_t stride, int64_t rows, int64_t depth, const float *panels, float *out, int64_t columns
) {
    int64_t blocks = (rows + 5) / 6; /* of nearly as many rows each: one of few would keep the panels waiting */
    for (int64_t column = 0; column < columns; column += 16) {
        for (int64_t k = 0; k < depth; k += 256) {
            const float *panel = panels + column * depth + 16 * k;
            int64_t some = depth - k < 256 ? depth - k : 256;
            for (int64_t block = 0; block < blocks; block++) {
                int64_t row = rows * block / blocks, next = rows * (block + 1) / blocks;
                const float *from = vectors + row * stride + k;
                float *to = out + row * columns + column;
                switch (next - row) {
                    case 1: add_block(1, from, stride, some, panel, to, columns); break;
                    case 2: add_block(2, from, stride, some, panel, to, columns); break;
                    case 3: add_block(3, from, stride, some, panel, to, columns); break;
                    case 4: add_block(4, from, stride, some, panel, to, columns); break;
                    case 5: add_block(5, from, stride, some, panel, to, columns); break;
                    default: add_block(6, from, stride, some, panel, to, columns);
                }
            }
        }
    }
}

/* The next whole number of panels. */
INLINE int64_t padded(int64_t columns) { return (columns + 15) / 16 * 16; }

struct StepLayer {
    const float *attention_norm;        /* (width,) */
    const float *qkv_proj, *qkv_bias;   /* to queries, keys and values, in panels; the bias, (columns,), or NULL */
    const float *query_norm, *key_norm; /* (size,), or NULL */
    const float *o_proj, *mlp_norm, *gate_and_up, *down;
    const float *prompt_keys, *prompt_values; /* (prompts, kv_heads, prompt_columns, size) */
};

enum { PAGE = 16 }; /* tokens of a page, which is (layers, 2, kv_heads, PAGE, size): keys and values of one row */

struct Step {
    int64_t layers, width, heads, kv_heads, size, inner, prompt_columns;
    int64_t row_pages; /* as many as a row may have */
    float epsilon;
    const struct StepLayer *layer;
    const float *embeddings;       /* (ids, width) */
    const float *norm;             /* (width,), the last one */
    const float *cosine, *sine;    /* (rows, size) */
    const int64_t *tokens;         /* (rows,) */
    float *const *pages;           /* (rows, row_pages) */
    const int64_t *written;        /* (rows,), tokens in a row's pages before this step */
    const int64_t *order;          /* (rows,) siblings one after another: their prompt is then at hand */
    const int64_t *prompt_of_row;  /* (rows,) */
    const int64_t *prompt_lengths; /* (prompts,) */
    float *states;                 /* (rows, width), normed */
};

/* The newest key and value of a row enter its last page; its queries attend to its prompt and its own past. `vectors`
   are its queries, keys and values. */
INLINE void attend(
    const struct Step *step, int64_t index, int64_t size, int64_t row, float *vectors, float *weights,
    float *restrict attention_output
) {
    const struct StepLayer *layer = step->layer + index;
    int64_t heads = step->heads, kv_heads = step->kv_heads, half = kv_heads * PAGE * size; /* a layer's keys in a page */
    int64_t newest = step->written[row], full = newest / PAGE;
    int64_t slot = step->prompt_of_row[row], prompt_length = step->prompt_lengths[slot];
    float *const *pages = step->pages + row * step->row_pages;
    const float *cosine = step->cosine + row * size, *sine = step->sine + row * size;
    for (int64_t head = 0; head < heads + kv_heads; head++) {
        float *vector = vectors + head * size;
        const float *norm = head < heads ? layer->query_norm : layer->key_norm;
        if (norm) norm_vector(vector, norm, size, step->epsilon, vector);
        rotate(vector, cosine, sine, size, vector);
    }
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
        float *key = pages[full] + 2 * index * half + (kv_head * PAGE + newest % PAGE) * size;
        memcpy(key, vectors + (heads + kv_head) * size, size * sizeof(float));
        memcpy(key + half, vectors + (heads + kv_heads + kv_head) * size, size * sizeof(float));
    }
    for (int64_t head = 0; head < heads; head++) {
        int64_t kv_head = head / (heads / kv_heads), prompt = (slot * kv_heads + kv_head) * step->prompt_columns * size;
        int64_t place = 2 * index * half + kv_head * PAGE * size; /* of its keys in a page */
        const float *query = vectors + head * size;
        float scale = 1 / sqrtf(size), sum[size], highest, *own = weights + prompt_length;
        score(query, layer->prompt_keys + prompt, prompt_length, size, size, scale, weights);
        for (int64_t page = 0; page < full; page++)
            score(query, pages[page] + place, PAGE, size, size, scale, own + page * PAGE);
        score(query, pages[full] + place, newest % PAGE + 1, size, size, scale, own + full * PAGE);
        float total = exponentials(weights, prompt_length + newest + 1, &highest);
        for (int64_t d = 0; d < size; d++) sum[d] = 0;
        mix(weights, layer->prompt_values + prompt, prompt_length, size, size, sum);
        for (int64_t page = 0; page < full; page++)
            mix(own + page * PAGE, pages[page] + place + half, PAGE, size, size, sum);
        mix(own + full * PAGE, pages[full] + place + half, newest % PAGE + 1, size, size, sum);
        for (int64_t d = 0; d < size; d++) attention_output[head * size + d] = sum[d] / total;
    }
}

INLINE void decode_rows(const struct Step *step, int64_t size, int64_t begin, int64_t end, float *scratch) {
    int64_t width = step->width, inner = step->inner, heads = step->heads * size, rows = end - begin;
    int64_t stride = padded(width), all = padded(heads + 2 * step->kv_heads * size), both = padded(2 * inner);
    const int64_t *order = step->order + begin;
    float *hidden = scratch, *states = hidden + rows * stride, *vectors = states + rows * stride;
    float *attention_output = vectors + rows * all, *gates = attention_output + rows * heads;
    float *products = gates + rows * both, *weights = products + rows * inner;
    for (int64_t i = 0; i < rows; i++)
        memcpy(hidden + i * stride, step->embeddings + step->tokens[order[i]] * width, width * sizeof(float));
    for (int64_t index = 0; index < step->layers; index++) {
        const struct StepLayer *layer = step->layer + index;
        for (int64_t i = 0; i < rows; i++) {
            norm_vector(hidden + i * stride, layer->attention_norm, width, step->epsilon, states + i * stride);
            if (layer->qkv_bias) memcpy(vectors + i * all, layer->qkv_bias, all * sizeof(float));
            else memset(vectors + i * all, 0, all * sizeof(float));
        }
        add_product(states, stride, rows, width, layer->qkv_proj, vectors, all);
        for (int64_t i = 0; i < rows; i++)
            attend(step, index, size, order[i], vectors + i * all, weights, attention_output + i * heads);
        add_product(attention_output, heads, rows, heads, layer->o_proj, hidden, stride);
        for (int64_t i = 0; i < rows; i++)
            norm_vector(hidden + i * stride, layer->mlp_norm, width, step->epsilon, states + i * stride);
        memset(gates, 0, rows * both * sizeof(float));
        add_product(states, stride, rows, width, layer->gate_and_up, gates, both);
        for (int64_t i = 0; i < rows; i++)
            multiply(gates + i * both, gates + i * both + inner, inner, products + i * inner);
        add_product(products, inner, rows, inner, layer->down, hidden, stride);
    }
    for (int64_t i = 0; i < rows; i++)
        norm_vector(hidden + i * stride, step->norm, width, step->epsilon, step->states + order[i] * width);
}

/* The last hidden states of the rows order[begin] to order[end - 1] after one more token each. `scratch` has room for
   padded(width) twice, padded((heads + 2 kv_heads) size), heads * size, padded(2 inner) and inner numbers a row, and for
   as many beside as a prompt and its response have tokens. */
INLINE void decode(const struct Step *step, int64_t begin, int64_t end, float *scratch) {
    WITH_SIZE(step->size, decode_rows, step, begin, end, scratch)
}
EXPORT(decode, (const struct Step *step, int64_t begin, int64_t end, float *scratch), (step, begin, end, scratch))

struct Packed {
    int64_t heads, kv_heads, size, tokens, segments;
    float scale;
    const int64_t *segment;                    /* (segments, 4): first token, tokens, first token of its prompt, tokens of it */
    const float *query, *key, *value;          /* (tokens, heads, size), and (tokens, kv_heads, size) twice */
    float *output, *logsumexp;                 /* (tokens, heads, size), (heads, tokens) */
    const float *grad_output;                  /* by the output */
    float *grad_query, *grad_key, *grad_value; /* those of keys and values are added to */
};

/* Every token attends to its segment up to itself, and to the whole prompt of its segment, if it has one. */
INLINE void packed_heads(const struct Packed *packed, int64_t size, int64_t begin, int64_t end, float *weights) {
    int64_t heads = packed->heads, group = heads / packed->kv_heads, stride = packed->kv_heads * size;
    for (int64_t head = begin * group; head < end * group; head++) {
        int64_t start = head / group * size;
        for (int64_t s = 0; s < packed->segments; s++) {
            const int64_t *segment = packed->segment + 4 * s;
            int64_t first = segment[0], prompt_length = segment[3];
            int64_t own = first * stride + start, prompt = segment[2] * stride + start;
            for (int64_t token = first; token < first + segment[1]; token++) {
                int64_t seen = token + 1 - first;
                const float *query = packed->query + (token * heads + head) * size;
                float sum[size], highest;
                score(query, packed->key + prompt, prompt_length, stride, size, packed->scale, weights);
                score(query, packed->key + own, seen, stride, size, packed->scale, weights + prompt_length);
                float total = exponentials(weights, prompt_length + seen, &highest);
                for (int64_t d = 0; d < size; d++) sum[d] = 0;
                mix(weights, packed->value + prompt, prompt_length, stride, size, sum);
                mix(weights + prompt_length, packed->value + own, seen, stride, size, sum);
                float *output = packed->output + (token * heads + head) * size;
                for (int64_t d = 0; d < size; d++) output[d] = sum[d] / total;
                packed->logsumexp[head * packed->tokens + token] = highest + logf(total);
            }
        }
    }
}

/* The gradients of that, by the equations of FlashAttention's backward pass (Dao et al. 2022, arXiv 2205.14135). */
INLINE void packed_heads_backward(
    const struct Packed *packed, int64_t size, int64_t begin, int64_t end, float *weights, float *grad_scores
) {
    int64_t heads = packed->heads, group = heads / packed->kv_heads, stride = packed->kv_heads * size;
    for (int64_t head = begin * group; head < end * group; head++) {
        int64_t start = head / group * size;
        for (int64_t s = 0; s < packed->segments; s++) {
            const int64_t *segment = packed->segment + 4 * s;
            int64_t first = segment[0], prompt_length = segment[3];
            int64_t own = first * stride + start, prompt = segment[2] * stride + start;
            for (int64_t token = first; token < first + segment[1]; token++) {
                int64_t seen = token + 1 - first, place = (token * heads + head) * size;
                const float *query = packed->query + place, *grad_output = packed->grad_output + place;
                score(query, packed->key + prompt, prompt_length, stride, size, packed->scale, weights);
                score(query, packed->key + own, seen, stride, size, packed->scale, weights + prompt_length);
                score(grad_output, packed->value + prompt, prompt_length, stride, size, 1, grad_scores);
                score(grad_output, packed->value + own, seen, stride, size, 1, grad_scores + prompt_length);
                float logsumexp = packed->logsumexp[head * packed->tokens + token], along = 0, sum[size];
                for (int64_t d = 0; d < size; d++) along += grad_output[d] * packed->output[place + d];
                for (int64_t j = 0; j < prompt_length + seen; j++) {
                    weights[j] = exponential(weights[j] - logsumexp);
                    grad_scores[j] = packed->scale * weights[j] * (grad_scores[j] - along);
                }
                for (int64_t d = 0; d < size; d++) sum[d] = 0;
                mix(grad_scores, packed->key + prompt, prompt_length, stride, size, sum);
                mix(grad_scores + prompt_length, packed->key + own, seen, stride, size, sum);
                memcpy(packed->grad_query + place, sum, sizeof sum);
                spread(grad_scores, query, prompt_length, stride, size, packed->grad_key + prompt);
                spread(grad_scores + prompt_length, query, seen, stride, size, packed->grad_key + own);
                spread(weights, grad_output, prompt_length, stride, size, packed->grad_value + prompt);
                spread(weights + prompt_length, grad_output, seen, stride, size, packed->grad_value + own);
            }
        }
    }
}

/* For the heads of keys from `begin` to `end` - 1 and all queries that read them; `weights` and `grad_scores` have room
   for the longest segment with its prompt. */
INLINE void packed_forward(const struct Packed *packed, int64_t begin, int64_t end, float *weights) {
    WITH_SIZE(packed->size, packed_heads, packed, begin, end, weights)
}
EXPORT(
    packed_forward,
    (const struct Packed *packed, int64_t begin, int64_t end, float *weights),
    (packed, begin, end, weights)
)

INLINE void packed_backward(
    const struct Packed *packed, int64_t begin, int64_t end, float *weights, float *grad_scores
) {
    WITH_SIZE(packed->size, packed_heads_backward, packed, begin, end, weights, grad_scores)
}
EXPORT(
    packed_backward,
    (const struct Packed *packed, int64_t begin, int64_t end, float *weights, float *grad_scores),
    (packed, begin, end, weights, grad_scores)
)
