/* What torch does in many passes over memory, in one or two: kernels.py says what each function computes.

   Every function works on one thread and allocates nothing. Images have their channels last. Sums run over 32 lanes, at most
   64 terms in the numbers' own kind and beyond that in double, in an order that depends on the sizes alone; those of
   convolutions over the terms of one pixel, or over AREA pixels, before double takes over. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 32
#define TOGETHER 64
#define STRIP 64 /* messages that are added in their own kind of number, as bounds.py knows */
#define COLUMNS 4096 /* of messages, added up together */
#define PART 1024 /* columns whose squares are added together */
#define FEW 16
#define MOST 4096 /* channels, as kernels.py knows */
#define BYTES 32 /* of a vector, as kernels.py knows */
#define SUMS 12 /* vectors that fit into registers beside what is multiplied */
#define AREA 256 /* pixels (or one row, if that is longer) whose products are added in their own kind */

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v3", "default"))) /* chosen when the library is loaded */
#define IS_FAST (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#else
#define FAST
#if defined(__AVX2__) && defined(__FMA__)
#define IS_FAST 1
#else
#define IS_FAST 0
#endif
#endif
#define INLINE static inline __attribute__((always_inline)) /* what is constant where it is called unrolls the loops */

/* Whether vectors of BYTES are numbers in registers here; without, convolutions are six times slower than torch's. */
long convolves(void) { return IS_FAST; }

/* A convolution of `each` images for each client: height x width x c to high x wide x o, by kernels of h x w, moved by
   (down, right), on images with `top` rows and `left` columns of zeros before and after. As kernels.py knows. */
typedef struct {
    long clients, each, height, width, c, high, wide, o, h, w, down, right, top, left;
} convolution;

#define real float
#define TRUNC truncf
#define NAMED(function) function##_float32
#include "kernels.h"
#undef real
#undef TRUNC
#undef NAMED

#define real double
#define TRUNC trunc
#define NAMED(function) function##_float64
#include "kernels.h"
