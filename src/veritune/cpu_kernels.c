/* What decode steps and training do between matrix products: on a CPU, in float32, without a copy, a mask or padding.

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
    const float *slope;           /* of the loss by what is normed */
    float *of_hidden;
};

/* 1 / sqrt(mean(x^2) + epsilon) */
INLINE float scale_of(const float *restrict hidden, int64_t size, float epsilon) {
    float squares = 0;
    for (int64_t d = 0; d < size; d++) squares += hidden[d] * hidden[d];
    return 1 / sqrtf(squares / size + epsilon);
}

/* weight * x / sqrt(mean(x^2) + epsilon), a row at a time. */
INLINE void rms_norm(const struct Norm *norm, int64_t begin, int64_t end) {
    int64_t size = norm->size;
    const float *restrict weight = norm->weight;
    for (int64_t row = begin; row < end; row++) {
        const float *restrict hidden = norm->hidden + row * size;
        float *restrict normed = norm->normed + row * size;
        float scale = scale_of(hidden, size, norm->epsilon);
        for (int64_t d = 0; d < size; d++) normed[d] = hidden[d] * scale * weight[d];
    }
}
EXPORT(rms_norm, (const struct Norm *norm, int64_t begin, int64_t end), (norm, begin, end))

/* Its slopes; of_weight (size,) is that of these rows alone. */
INLINE void rms_norm_backward(const struct Norm *norm, int64_t begin, int64_t end, float *restrict of_weight) {
    int64_t size = norm->size;
    const float *restrict weight = norm->weight;
    memset(of_weight, 0, size * sizeof(float));
    for (int64_t row = begin; row < end; row++) {
        const float *restrict hidden = norm->hidden + row * size, *restrict slope = norm->slope + row * size;
        float *restrict of_hidden = norm->of_hidden + row * size;
        float scale = scale_of(hidden, size, norm->epsilon), along = 0;
        for (int64_t d = 0; d < size; d++) along += slope[d] * weight[d] * hidden[d];
        along *= scale * scale / size;
        for (int64_t d = 0; d < size; d++) {
            of_hidden[d] = scale * (slope[d] * weight[d] - along * hidden[d]);
            of_weight[d] += slope[d] * hidden[d] * scale;
        }
    }
}
EXPORT(
    rms_norm_backward,
    (const struct Norm *norm, int64_t begin, int64_t end, float *of_weight),
    (norm, begin, end, of_weight)
)

struct Gated {
    int64_t size, stride;   /* from a row of gate and of up to the next one */
    const float *gate, *up; /* (rows, size) */
    float *product;         /* (rows, size), as are the others */
    const float *slope;     /* of the loss by the product */
    float *of_gate, *of_up; /* of_gate may be in the place of slope */
};

/* gate / (1 + e^-gate) * up. */
INLINE void swiglu(const struct Gated *gated, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const float *restrict gate = gated->gate + row * gated->stride, *restrict up = gated->up + row * gated->stride;
        float *restrict product = gated->product + row * gated->size;
        for (int64_t d = 0; d < gated->size; d++) product[d] = gate[d] / (1 + exponential(-gate[d])) * up[d];
    }
}
EXPORT(swiglu, (const struct Gated *gated, int64_t begin, int64_t end), (gated, begin, end))

/* Its slopes. */
INLINE void swiglu_backward(const struct Gated *gated, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const float *restrict gate = gated->gate + row * gated->stride, *restrict up = gated->up + row * gated->stride;
        const float *slope = gated->slope + row * gated->size;
        float *restrict of_up = gated->of_up + row * gated->size;
        float *of_gate = gated->of_gate + row * gated->size;
#pragma GCC ivdep
        for (int64_t d = 0; d < gated->size; d++) {
            float sigmoid = 1 / (1 + exponential(-gate[d])), silu = gate[d] * sigmoid, by_product = slope[d];
            of_up[d] = by_product * silu;
            of_gate[d] = by_product * up[d] * (sigmoid + silu * (1 - sigmoid));
        }
    }
}
EXPORT(swiglu_backward, (const struct Gated *gated, int64_t begin, int64_t end), (gated, begin, end))

struct Step {
    int64_t heads, kv_heads, size, prompt_width, width;
    int64_t column; /* the present one */
    float scale;
    const float *query_and_key; /* (rows, heads + kv_heads, size), of each row `stride` after the row before */
    int64_t stride;
    const float *value; /* (rows, kv_heads, size), likewise */
    int64_t value_stride;
    const float *cosine, *sine;               /* (rows, size) */
    const float *prompt_keys, *prompt_values; /* (prompts, kv_heads, prompt_width, size) */
    float *keys, *values;                     /* (rows, kv_heads, width, size) */
    const int64_t *order;                     /* (rows,) siblings one after another: their prompt is then at hand */
    const int64_t *slots;                     /* (rows,) the prompt of each row */
    const int64_t *prompt_lengths;            /* (prompts,) */
    const int64_t *first_columns;             /* (rows,) */
    float *mixed;                             /* (rows, heads, size) */
};

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

INLINE void attend_rows(const struct Step *step, int64_t size, int64_t begin, int64_t end, float *weights) {
    int64_t heads = step->heads, kv_heads = step->kv_heads, group = heads / kv_heads;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = step->order[i], slot = step->slots[row], first = step->first_columns[row];
        int64_t prompt_length = step->prompt_lengths[slot], own = step->column + 1 - first, count = prompt_length + own;
        const float *vectors = step->query_and_key + row * step->stride;
        const float *cosine = step->cosine + row * size, *sine = step->sine + row * size;
        for (int64_t head = 0; head < heads; head++) {
            int64_t kv_head = head / group;
            int64_t prompt = (slot * kv_heads + kv_head) * step->prompt_width * size;
            int64_t past = ((row * kv_heads + kv_head) * step->width + first) * size;
            if (head % group == 0) { /* the first that reads them */
                int64_t newest = past + (own - 1) * size;
                rotate(vectors + (heads + kv_head) * size, cosine, sine, size, step->keys + newest);
                const float *value = step->value + row * step->value_stride + kv_head * size;
                memcpy(step->values + newest, value, size * sizeof(float));
            }
            float query[size], sum[size], highest;
            rotate(vectors + head * size, cosine, sine, size, query);
            score(query, step->prompt_keys + prompt, prompt_length, size, size, step->scale, weights);
            score(query, step->keys + past, own, size, size, step->scale, weights + prompt_length);
            float total = exponentials(weights, count, &highest);
            for (int64_t d = 0; d < size; d++) sum[d] = 0;
            mix(weights, step->prompt_values + prompt, prompt_length, size, size, sum);
            mix(weights + prompt_length, step->values + past, own, size, size, sum);
            float *mixed = step->mixed + (row * heads + head) * size;
            for (int64_t d = 0; d < size; d++) mixed[d] = sum[d] / total;
        }
    }
}

/* Each row's newest key and value enter the cache, and its query attends to its prompt and its own past: for the rows
   order[begin] to order[end - 1]. `weights` has room for prompt_width + width numbers. */
INLINE void attend(const struct Step *step, int64_t begin, int64_t end, float *weights) {
    WITH_SIZE(step->size, attend_rows, step, begin, end, weights)
}
EXPORT(attend, (const struct Step *step, int64_t begin, int64_t end, float *weights), (step, begin, end, weights))

struct Packed {
    int64_t heads, kv_heads, size, tokens, segments;
    float scale;
    const int64_t *segment;            /* (segments, 4): first token, tokens, first token of its prompt, tokens of it */
    const float *query, *key, *value;  /* (tokens, heads, size), and (tokens, kv_heads, size) twice */
    float *output, *logsumexp;         /* (tokens, heads, size), (heads, tokens) */
    const float *slope;                /* of the loss by the output */
    float *of_query, *of_key, *of_value; /* its slopes by the rest; those of keys and values are added to */
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

/* The slopes of that, by the equations of FlashAttention's backward pass (Dao et al. 2022, arXiv 2205.14135). */
INLINE void packed_heads_backward(
    const struct Packed *packed, int64_t size, int64_t begin, int64_t end, float *weights, float *slopes
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
                const float *query = packed->query + place, *slope = packed->slope + place;
                score(query, packed->key + prompt, prompt_length, stride, size, packed->scale, weights);
                score(query, packed->key + own, seen, stride, size, packed->scale, weights + prompt_length);
                score(slope, packed->value + prompt, prompt_length, stride, size, 1, slopes);
                score(slope, packed->value + own, seen, stride, size, 1, slopes + prompt_length);
                float logsumexp = packed->logsumexp[head * packed->tokens + token], along = 0, sum[size];
                for (int64_t d = 0; d < size; d++) along += slope[d] * packed->output[place + d];
                for (int64_t j = 0; j < prompt_length + seen; j++) {
                    weights[j] = exponential(weights[j] - logsumexp);
                    slopes[j] = packed->scale * weights[j] * (slopes[j] - along);
                }
                for (int64_t d = 0; d < size; d++) sum[d] = 0;
                mix(slopes, packed->key + prompt, prompt_length, stride, size, sum);
                mix(slopes + prompt_length, packed->key + own, seen, stride, size, sum);
                memcpy(packed->of_query + place, sum, sizeof sum);
                spread(slopes, query, prompt_length, stride, size, packed->of_key + prompt);
                spread(slopes + prompt_length, query, seen, stride, size, packed->of_key + own);
                spread(weights, slope, prompt_length, stride, size, packed->of_value + prompt);
                spread(weights + prompt_length, slope, seen, stride, size, packed->of_value + own);
            }
        }
    }
}

/* For the heads of keys from `begin` to `end` - 1 and all queries that read them; `weights` and `slopes` have room for
   the longest segment with its prompt. */
INLINE void packed_forward(const struct Packed *packed, int64_t begin, int64_t end, float *weights) {
    WITH_SIZE(packed->size, packed_heads, packed, begin, end, weights)
}
EXPORT(
    packed_forward,
    (const struct Packed *packed, int64_t begin, int64_t end, float *weights),
    (packed, begin, end, weights)
)

INLINE void packed_backward(const struct Packed *packed, int64_t begin, int64_t end, float *weights, float *slopes) {
    WITH_SIZE(packed->size, packed_heads_backward, packed, begin, end, weights, slopes)
}
EXPORT(
    packed_backward,
    (const struct Packed *packed, int64_t begin, int64_t end, float *weights, float *slopes),
    (packed, begin, end, weights, slopes)
)
