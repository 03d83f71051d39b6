// Products of few rows with int4 weights by AVX-512 VNNI: `int4_product`, which kernel.py loads.
//
// A block holds 16 outputs and one group of inputs: 16 scales, 16 zeros, then the codes. Each 64 bytes of codes are 8
// inputs of the 16 outputs, one output a lane. The low nibbles of a lane are inputs 0 to 3, the high ones 4 to 7.
// An activation is step * (256 * high + low) with signed 8-bit digits and a step per row and group. Sums within a group
// are exact integers. A row is computed alike in every tile, so its bits do not depend on other rows or on threads.
#include <immintrin.h>
#include <stdint.h>

enum { LANES = 16, TILE = 8, PANEL = 64, AHEAD = 2048, MAX_STEPS = 127 * 257 - 1 };
enum { BFLOAT16, FLOAT16, FLOAT32 };  // types of scales and activations

typedef struct {  // of a row's group
    int32_t high, low;  // -center * the sum of the digits
    float step, sum;    // sum of the rounded activations
    int32_t fours[];    // `group` high digits, four at a time, then as many low ones
} Digits;

static inline __m512 load(const void *x, long at, int type)  // 16 numbers as float32
{
    if (type == FLOAT32) return _mm512_loadu_ps((const float *)x + at);
    __m256i half = _mm256_loadu_si256((const void *)((const uint16_t *)x + at));
    if (type == FLOAT16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline void store(void *y, long at, __m512 sum, __mmask16 lanes, int type)  // rounded to nearest, ties to even
{
    if (type == FLOAT32) { _mm512_mask_storeu_ps((float *)y + at, lanes, sum); return; }
    __m512i bits = _mm512_castps_si512(sum), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m256i half = type == FLOAT16 ? _mm512_cvtps_ph(sum, 0) : _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
    _mm256_mask_storeu_epi16((uint16_t *)y + at, lanes, half);
}

// |x - step * (256 * high + low)| <= step / 2. The maximum of bit patterns keeps NaN, which makes the row's result NaN.
static void make_digits(const void *x, long at, int type, int group, int center, Digits *digits)
{
    __m512i bits = _mm512_setzero_si512(), high_sum = bits, low_sum = bits;
    for (int i = 0; i < group; i += LANES)
        bits = _mm512_max_epu32(bits, _mm512_slli_epi32(_mm512_castps_si512(load(x, at + i, type)), 1));
    float max = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epu32(bits) >> 1)));
    digits->step = (max < 1e-30f ? 1e-30f : max) / MAX_STEPS;
    char *codes = (char *)digits->fours;
    for (int i = 0; i < group; i += LANES) {
        __m512i steps = _mm512_cvtps_epi32(_mm512_div_ps(load(x, at + i, type), _mm512_set1_ps(digits->step)));
        __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(steps, 24), 24);
        __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(steps, low), 8);
        _mm_storeu_si128((void *)(codes + i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((void *)(codes + group + i), _mm512_cvtepi32_epi8(low));
        high_sum = _mm512_add_epi32(high_sum, high), low_sum = _mm512_add_epi32(low_sum, low);
    }
    uint32_t high = _mm512_reduce_add_epi32(high_sum), low = _mm512_reduce_add_epi32(low_sum);
    digits->sum = digits->step * (float)(int32_t)(256 * high + low);
    digits->high = -(uint32_t)center * high, digits->low = -(uint32_t)center * low;
}

// 16 outputs of ROWS rows. The digits of a tile lie group by group, and inside a group row by row.
static inline __attribute__((always_inline)) void multiply(
    const int ROWS, const char *block, const char *digits, long groups, int group, int type, __m512 *y)
{
    const __m512i nibble = _mm512_set1_epi8(15);
    const long size = sizeof(Digits) + 2 * group, scale_bytes = LANES * (type == FLOAT32 ? 4 : 2);
    for (int r = 0; r < ROWS; r++) y[r] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++, digits += ROWS * size) {
        __m512 scale = load(block, 0, type), zero = load(block, LANES, type);
        __m512i high[TILE], low[TILE];
        block += 2 * scale_bytes;
        const Digits *row[TILE];
        for (int r = 0; r < ROWS; r++) {
            row[r] = (const void *)(digits + r * size);
            high[r] = _mm512_set1_epi32(row[r]->high), low[r] = _mm512_set1_epi32(row[r]->low);
        }
        for (int i = 0; i < group; i += 8, block += 64) {
            _mm_prefetch(block + AHEAD, _MM_HINT_T0);
            __m512i codes = _mm512_loadu_si512(block), first = _mm512_and_si512(codes, nibble);
            __m512i second = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
            for (int r = 0; r < ROWS; r++) {
                const int32_t *fours = row[r]->fours + i / 4;
                high[r] = _mm512_dpbusd_epi32(high[r], first, _mm512_set1_epi32(fours[0]));
                high[r] = _mm512_dpbusd_epi32(high[r], second, _mm512_set1_epi32(fours[1]));
                low[r] = _mm512_dpbusd_epi32(low[r], first, _mm512_set1_epi32(fours[group / 4]));
                low[r] = _mm512_dpbusd_epi32(low[r], second, _mm512_set1_epi32(fours[group / 4 + 1]));
            }
        }
        for (int r = 0; r < ROWS; r++) {
            __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]));
            y[r] = _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(row[r]->step)), scale, y[r]);
            y[r] = _mm512_fmadd_ps(_mm512_set1_ps(row[r]->sum), zero, y[r]);
        }
    }
}

// x (rows, groups * group) -> y (rows, outputs), both of x_type. `digits` has rows * groups * (16 + 2 * group) bytes.
void int4_product(const void *x, void *y, const char *blocks, char *digits, long rows, long groups, long outputs,
                  int group, int center, int type, int x_type, int threads)
{
    const long size = sizeof(Digits) + 2 * group, block_bytes = LANES * (group / 2 + (type == FLOAT32 ? 8 : 4));
#pragma omp parallel for num_threads(threads) if (rows > TILE)
    for (long r = 0; r < rows; r++) {
        long begin = r / TILE * TILE, count = rows - begin < TILE ? rows - begin : TILE;
        char *at = digits + (begin * groups + r - begin) * size;
        for (long g = 0; g < groups; g++, at += count * size)
            make_digits(x, (r * groups + g) * group, x_type, group, center, (Digits *)at);
    }
    for (long panel = 0; panel < rows; panel += PANEL)  // its digits stay in the second cache
#pragma omp parallel for num_threads(threads)
        for (long output = 0; output < outputs; output += LANES)
            for (long begin = panel; begin < rows && begin < panel + PANEL; begin += TILE) {
                long count = rows - begin < TILE ? rows - begin : TILE;
                const char *block = blocks + output / LANES * groups * block_bytes;
                const char *tile = digits + begin * groups * size;
                __mmask16 lanes = outputs - output < LANES ? (1 << (outputs - output)) - 1 : 0xffff;
                __m512 sums[TILE];
#define CASE(N) case N: multiply(N, block, tile, groups, group, type, sums); break;
                switch (count) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
                for (long r = 0; r < count; r++) store(y, (begin + r) * outputs + output, sums[r], lanes, x_type);
            }
}
