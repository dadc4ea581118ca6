/* What torch does in many passes over memory, in one or two: kernels.py says what each function computes.

   Every function works on one thread and allocates nothing. Images have their channels last. Sums run over 32 lanes, at most
   64 terms in the numbers' own kind and beyond that in double, in an order that depends on the sizes alone. */

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

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v3", "default"))) /* chosen when the library is loaded */
#define INLINE static inline __attribute__((always_inline))
#else
#define FAST
#define INLINE static inline
#endif

#define real float
#define NAMED(function) function##_float32
#include "kernels.h"
#undef real
#undef NAMED

#define real double
#define NAMED(function) function##_float64
#include "kernels.h"
