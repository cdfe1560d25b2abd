/* What a decode step on a CPU does between its matrix products, in float32, without a copy, a mask or padding.

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

/* weight * x / sqrt(mean(x^2) + epsilon), a row at a time. */
INLINE void rms_norm(
    int64_t rows, int64_t size, float epsilon, const float *restrict hidden, const float *restrict weight,
    float *restrict normed
) {
    for (int64_t row = 0; row < rows; row++, hidden += size, normed += size) {
        float squares = 0;
        for (int64_t d = 0; d < size; d++) squares += hidden[d] * hidden[d];
        float scale = 1 / sqrtf(squares / size + epsilon);
        for (int64_t d = 0; d < size; d++) normed[d] = hidden[d] * scale * weight[d];
    }
}
EXPORT(
    rms_norm,
    (int64_t rows, int64_t size, float epsilon, const float *hidden, const float *weight, float *normed),
    (rows, size, epsilon, hidden, weight, normed)
)

/* gate / (1 + e^-gate) * up, with gate and up (rows, size) side by side. */
INLINE void swiglu(int64_t rows, int64_t size, const float *restrict gate_and_up, float *restrict product) {
    for (int64_t row = 0; row < rows; row++, gate_and_up += 2 * size, product += size)
        for (int64_t d = 0; d < size; d++)
            product[d] = gate_and_up[d] / (1 + exponential(-gate_and_up[d])) * gate_and_up[size + d];
}
EXPORT(swiglu, (int64_t rows, int64_t size, const float *gate_and_up, float *product), (rows, size, gate_and_up, product))

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

/* Rotary positions: the sine has its sign changed in the first half already. */
INLINE void rotate(const float *vector, const float *cosine, const float *sine, int64_t size, float *rotated) {
    int64_t half = size / 2;
    for (int64_t d = 0; d < half; d++) {
        rotated[d] = vector[d] * cosine[d] + vector[half + d] * sine[d];
        rotated[half + d] = vector[half + d] * cosine[half + d] + vector[d] * sine[half + d];
    }
}

INLINE void score(const float *query, const float *keys, int64_t count, int64_t size, float scale, float *scores) {
    for (int64_t j = 0; j < count; j++) {
        float sum = 0;
        for (int64_t d = 0; d < size; d++) sum += query[d] * keys[j * size + d];
        scores[j] = sum * scale;
    }
}

INLINE void mix(const float *weights, const float *values, int64_t count, int64_t size, float *sum) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t d = 0; d < size; d++) sum[d] += weights[j] * values[j * size + d];
}

INLINE void attend_rows(const struct Step *step, int64_t size, int64_t begin, int64_t end, float *weights) {
    int64_t heads = step->heads, kv_heads = step->kv_heads;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = step->order[i], slot = step->slots[row], first = step->first_columns[row];
        int64_t asked = step->prompt_lengths[slot], own = step->column + 1 - first, count = asked + own;
        const float *vectors = step->query_and_key + row * step->stride;
        const float *cosine = step->cosine + row * size, *sine = step->sine + row * size;
        for (int64_t head = 0; head < heads; head++) {
            int64_t kv_head = head * kv_heads / heads;
            int64_t prompt = (slot * kv_heads + kv_head) * step->prompt_width * size;
            int64_t past = ((row * kv_heads + kv_head) * step->width + first) * size;
            if (head * kv_heads % heads == 0) { /* the first that reads them */
                int64_t newest = past + (own - 1) * size;
                rotate(vectors + (heads + kv_head) * size, cosine, sine, size, step->keys + newest);
                const float *value = step->value + row * step->value_stride + kv_head * size;
                memcpy(step->values + newest, value, size * sizeof(float));
            }
            float query[size], sum[size], total = 0;
            rotate(vectors + head * size, cosine, sine, size, query);
            score(query, step->prompt_keys + prompt, asked, size, step->scale, weights);
            score(query, step->keys + past, own, size, step->scale, weights + asked);
            float highest = weights[0];
            for (int64_t j = 0; j < count; j++) highest = weights[j] > highest ? weights[j] : highest;
            for (int64_t j = 0; j < count; j++) weights[j] = exponential(weights[j] - highest);
            for (int64_t j = 0; j < count; j++) total += weights[j];
            for (int64_t d = 0; d < size; d++) sum[d] = 0;
            mix(weights, step->prompt_values + prompt, asked, size, sum);
            mix(weights + asked, step->values + past, own, size, sum);
            float *mixed = step->mixed + (row * heads + head) * size;
            for (int64_t d = 0; d < size; d++) mixed[d] = sum[d] / total;
        }
    }
}

/* Each row's newest key and value enter the cache, and its query attends to its prompt and its own past: for the rows
   order[begin] to order[end - 1]. `weights` has room for prompt_width + width numbers. */
INLINE void attend(const struct Step *step, int64_t begin, int64_t end, float *weights) {
    switch (step->size) { /* a size that the compiler knows takes a third less time */
        case 32: attend_rows(step, 32, begin, end, weights); break;
        case 64: attend_rows(step, 64, begin, end, weights); break;
        case 128: attend_rows(step, 128, begin, end, weights); break;
        default: attend_rows(step, step->size, begin, end, weights);
    }
}
EXPORT(attend, (const struct Step *step, int64_t begin, int64_t end, float *weights), (step, begin, end, weights))
