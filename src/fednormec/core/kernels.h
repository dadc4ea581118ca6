/* The functions of kernels.c for one kind of number: `real`, with names that end as NAMED says. */

/* What comes back through max(0, u y + w): all of x, or nothing; all of it where there is no such function. */
INLINE real NAMED(passed)(real x, real y, real u, real w, int relu) { return relu && u * y + w <= 0 ? 0 : x; }

/* s += sum of x, q += sum of x y, lane by lane, over `rows` rows that lie `stride` apart; x as it is passed. */
INLINE void NAMED(lane_sums)(const real *x, const real *y, long rows, long stride, const real *restrict u,
                             const real *restrict w, int relu, double *restrict s, double *restrict q) {
    for (long done = 0; done < rows; done += TOGETHER) {
        long end = rows - done < TOGETHER ? rows - done : TOGETHER;
        real a[LANES] = {0}, b[LANES] = {0};
        for (long i = 0; i < end; i++, x += stride, y += stride)
            for (int l = 0; l < LANES; l++) {
                real some = NAMED(passed)(x[l], y[l], u[l], w[l], relu);
                a[l] += some;
                b[l] += some * y[l];
            }
        for (int l = 0; l < LANES; l++) {
            s[l] += a[l];
            q[l] += b[l];
        }
    }
}

/* The same for all c columns. */
INLINE void NAMED(column_sums)(const real *x, const real *y, long positions, long c, const real *restrict u,
                               const real *restrict w, int relu, double *restrict s, double *restrict q) {
    long done = 0;
    memset(s, 0, c * sizeof *s);
    memset(q, 0, c * sizeof *q);
    if (c % LANES == 0) {
        for (long at = 0; at < c; at += LANES)
            NAMED(lane_sums)(x + at, y + at, positions, c, u + at, w + at, relu, s + at, q + at);
        return;
    }
    if (c < LANES && LANES % c == 0) {
        double a[LANES] = {0}, b[LANES] = {0};
        real uu[LANES], ww[LANES];
        for (int l = 0; l < LANES; l++) uu[l] = u[l % c], ww[l] = w[l % c];
        done = positions * c / LANES * LANES;
        NAMED(lane_sums)(x, y, done / LANES, LANES, uu, ww, relu, a, b);
        for (int l = 0; l < LANES; l++) {
            s[l % c] += a[l];
            q[l % c] += b[l];
        }
    }
    x += done, y += done;
    for (long left = positions * c - done; left > 0; left -= c, x += c, y += c)
        for (long k = 0; k < (left < c ? left : c); k++) {
            real some = NAMED(passed)(x[k], y[k], u[k], w[k], relu);
            s[k] += some;
            q[k] += (double)some * y[k];
        }
}

/* z = u x + v y + t, where u, v and t are those of the column, and x as it is passed by u y + w. */
INLINE void NAMED(affine)(const real *x, const real *y, const real *restrict u, const real *restrict v,
                          const real *restrict t, const real *restrict w, int relu, real *restrict z, long positions,
                          long c) {
    long done = 0, size = positions * c, wide = c;
    real uu[LANES], vv[LANES], tt[LANES], ww[LANES];
    if (c < LANES && LANES % c == 0) { /* as if there were as many columns as lanes */
        for (int l = 0; l < LANES; l++) uu[l] = u[l % c], vv[l] = v[l % c], tt[l] = t[l % c], ww[l] = w[l % c];
        u = uu, v = vv, t = tt, w = ww;
        wide = LANES;
    }
    if (wide % LANES == 0)
        for (; done + wide <= size; done += wide, x += wide, y += wide, z += wide)
            for (long at = 0; at < wide; at += LANES)
                for (int l = 0; l < LANES; l++) {
                    long k = at + l;
                    z[k] = u[k] * NAMED(passed)(x[k], y[k], u[k], w[k], relu) + (v[k] * y[k] + t[k]);
                }
    for (long left = size - done; left > 0; left -= c, x += c, y += c, z += c)
        for (long k = 0; k < (left < c ? left : c); k++)
            z[k] = u[k] * NAMED(passed)(x[k], y[k], u[k], w[k], relu) + (v[k] * y[k] + t[k]);
}

/* z = max(0, u x + w), or without the maximum; what is not a number stays so. */
INLINE void NAMED(scaled)(const real *restrict x, const real *restrict u, const real *restrict w, int relu,
                          real *restrict z, long positions, long c) {
    long done = 0, size = positions * c, wide = c;
    real uu[LANES], ww[LANES];
    if (c < LANES && LANES % c == 0) {
        for (int l = 0; l < LANES; l++) uu[l] = u[l % c], ww[l] = w[l % c];
        u = uu, w = ww;
        wide = LANES;
    }
    if (wide % LANES == 0)
        for (; done + wide <= size; done += wide, x += wide, z += wide)
            for (long at = 0; at < wide; at += LANES)
                for (int l = 0; l < LANES; l++) {
                    real value = u[at + l] * x[at + l] + w[at + l];
                    z[at + l] = relu && value < 0 ? 0 : value;
                }
    for (long left = size - done; left > 0; left -= c, x += c, z += c)
        for (long k = 0; k < (left < c ? left : c); k++) {
            real value = u[k] * x[k] + w[k];
            z[k] = relu && value < 0 ? 0 : value;
        }
}

FAST void NAMED(group_norm)(const real *restrict a, long examples, long positions, long c, long groups,
                            const real *restrict weight, const real *restrict bias, long per_client, long stride,
                            long relu, double eps, real *restrict z, real *restrict mean, real *restrict scale,
                            real *restrict shift, real *restrict r) {
    double s[MOST], q[MOST];
    long wide = c / groups;
    for (long i = 0; i < examples; i++) {
        const real *w = weight + i / per_client * stride, *b = bias + i / per_client * stride;
        NAMED(column_sums)(a, a, positions, c, w, w, 0, s, q);
        for (long g = 0; g < groups; g++) {
            double sum = 0, square = 0, count = (double)positions * wide;
            for (long k = g * wide; k < (g + 1) * wide; k++) sum += s[k], square += q[k];
            double m = sum / count, variance = square / count - m * m;
            mean[g] = m;
            r[g] = 1 / sqrt((variance < 0 ? 0 : variance) + eps);
            for (long k = g * wide; k < (g + 1) * wide; k++) {
                scale[k] = r[g] * w[k];
                shift[k] = b[k] - mean[g] * scale[k];
            }
        }
        if (relu) NAMED(scaled)(a, scale, shift, 1, z, positions, c);
        else NAMED(scaled)(a, scale, shift, 0, z, positions, c);
        a += positions * c, z += positions * c, mean += groups, r += groups, scale += c, shift += c;
    }
}

FAST void NAMED(group_norm_back)(const real *restrict a, const real *restrict delta, long examples, long positions,
                                 long c, long groups, long relu, const real *restrict mean,
                                 const real *restrict scale, const real *restrict shift, const real *restrict r,
                                 real *restrict result, real *restrict weight_sums, real *restrict bias_sums) {
    double alone[MOST], both[MOST];
    real slope[MOST], level[MOST];
    long wide = c / groups;
    for (long i = 0; i < examples; i++) {
        if (relu) NAMED(column_sums)(delta, a, positions, c, scale, shift, 1, alone, both);
        else NAMED(column_sums)(delta, a, positions, c, scale, shift, 0, alone, both);
        for (long g = 0; g < groups; g++) {
            double m = mean[g], rg = r[g], sum = 0, product = 0, count = (double)positions * wide;
            for (long k = g * wide; k < (g + 1) * wide; k++) {
                double centred = both[k] - alone[k] * m;
                weight_sums[k] = centred * rg;
                bias_sums[k] = alone[k];
                product += centred * scale[k];
                sum += alone[k] * scale[k];
            }
            double sl = product / count * rg * rg, lv = sum / count;
            for (long k = g * wide; k < (g + 1) * wide; k++) slope[k] = -sl, level[k] = m * sl - lv;
        }
        if (relu) NAMED(affine)(delta, a, scale, slope, level, shift, 1, result, positions, c);
        else NAMED(affine)(delta, a, scale, slope, level, shift, 0, result, positions, c);
        a += positions * c, delta += positions * c, result += positions * c;
        mean += groups, r += groups, scale += c, shift += c, weight_sums += c, bias_sums += c;
    }
}

/* The largest of two by two, and which it was; of equals the first. Not a number wins, as in torch. With `relu` zero
   where that is not positive, and then it was none of the four. */
FAST void NAMED(max_pool)(const real *restrict a, long examples, long height, long width, long c, long relu,
                          real *restrict z, int32_t *restrict which) {
    long high = height / 2, wide = width / 2;
    for (long i = 0; i < examples; i++, a += height * width * c)
        for (long y = 0; y < high; y++)
            for (long x = 0; x < wide; x++, z += c, which += c) {
                const real *p = a + (2 * y * width + 2 * x) * c, *below = p + width * c;
                for (long k = 0; k < c; k++) {
                    real most = p[k], v[3] = {p[c + k], below[k], below[c + k]};
                    int32_t at = 0;
                    for (int j = 0; j < 3; j++) {
                        int wins = (v[j] > most) | (v[j] != v[j]);
                        most = wins ? v[j] : most;
                        at = wins ? j + 1 : at;
                    }
                    int none = (relu != 0) & (most <= 0);
                    z[k] = none ? 0 : most;
                    which[k] = none ? 4 : at;
                }
            }
}

FAST void NAMED(max_pool_back)(const real *restrict delta, const int32_t *restrict which, long examples, long height,
                               long width, long c, real *restrict result) {
    long high = height / 2, wide = width / 2;
    for (long i = 0; i < examples; i++, result += height * width * c) {
        for (long y = 0; y < high; y++) {
            real *row = result + 2 * y * width * c, *next = row + width * c;
            for (long x = 0; x < wide; x++, delta += c, which += c) {
                for (int j = 0; j < 4; j++) {
                    real *restrict p = (j < 2 ? row : next) + (2 * x + j % 2) * c;
                    for (long k = 0; k < c; k++) p[k] = which[k] == j ? delta[k] : 0;
                }
            }
            if (width % 2) {
                memset(row + (width - 1) * c, 0, c * sizeof *row);
                memset(next + (width - 1) * c, 0, c * sizeof *row);
            }
        }
        if (height % 2) memset(result + (height - 1) * width * c, 0, width * c * sizeof *result);
    }
}

/* A number rounded towards zero to a whole multiple of `unit`, a power of two; `per` is 1 / unit. */
INLINE real NAMED(on_grid)(real x, real per, real unit) { return TRUNC(x * per) * unit; }

/* Per row: u <- u - v, and where the norm n of that is no oddity v <- v + beta f u with f = min(length(n), most) / n;
   length(n) is radius n / (n + parameter) or, where that is to be clipped, min(n, parameter). f is nan for an odd row.
   With a unit above 0 the messages f u are put on that grid, u <- f u and v <- v + beta u. */
FAST void NAMED(feedback)(real *restrict u, real *restrict v, long rows, long d, long u_stride, long v_stride,
                          long clips, double parameter, double radius, double most, double beta, double unit,
                          real *restrict factors) {
    real per = unit > 0 ? (real)(1 / unit) : 0, whole = (real)unit, moved = (real)beta;
    for (long i = 0; i < rows; i++, u += u_stride, v += v_stride) {
        double lanes[LANES] = {0}, square = 0;
        long done = 0;
        while (done + LANES <= d) {
            real sums[LANES] = {0};
            for (int t = 0; t < TOGETHER && done + LANES <= d; t++, done += LANES)
                for (int l = 0; l < LANES; l++) {
                    real w = u[done + l] - v[done + l];
                    u[done + l] = w;
                    sums[l] += w * w;
                }
            for (int l = 0; l < LANES; l++) lanes[l] += sums[l];
        }
        for (int l = 0; l < LANES; l++) square += lanes[l];
        for (; done < d; done++) {
            real w = u[done] - v[done];
            u[done] = w;
            square += (double)w * w;
        }
        double n = sqrt(square), length = clips ? (n < parameter ? n : parameter) : radius * (n / (n + parameter));
        double quotient = (length < most ? length : most) / n;
        int usual = n > 1e-15 && n < 1e15 && quotient > 1e-30 && quotient < 1e30;
        real f = usual ? (real)quotient : (real)NAN, step = usual ? (real)beta * f : 0;
        factors[i] = f;
        if (usual && unit > 0)
            for (long k = 0; k < d; k++) {
                real sent = NAMED(on_grid)(u[k] * f, per, whole);
                u[k] = sent;
                v[k] += moved * sent;
            }
        else if (usual)
            for (long k = 0; k < d; k++) v[k] += step * u[k];
    }
}

/* Per row: a <- f_i a on the grid of a unit, or a on that grid where there are no factors. */
FAST void NAMED(truncate)(real *restrict a, const real *restrict factors, long rows, long d, long stride, double unit) {
    real per = (real)(1 / unit), whole = (real)unit;
    for (long i = 0; i < rows; i++, a += stride) {
        real f = factors ? factors[i] : 1;
        for (long k = 0; k < d; k++) a[k] = NAMED(on_grid)(a[k] * f, per, whole);
    }
}

/* total += sum of the rows whose weight is not 0, rounded towards zero to whole units; squares_i is the sum of row i's
   squares in units. Whole numbers below 2^53 add up without rounding in whatever order. */
FAST void NAMED(sum_units)(const real *restrict a, const real *restrict weights, long rows, long d, long stride,
                           double unit, double *restrict total, double *restrict squares) {
    real per = (real)(1 / unit);
    memset(squares, 0, rows * sizeof *squares);
    for (long begin = 0; begin < d; begin += COLUMNS) {
        long width = d - begin < COLUMNS ? d - begin : COLUMNS;
        double *restrict sums = total + begin;
        for (long i = 0; i < rows; i++) {
            if (weights[i] == 0) continue;
            const real *restrict row = a + i * stride + begin;
            double q[FEW] = {0};
            long k = 0;
            for (; k + FEW <= width; k += FEW)
                for (int l = 0; l < FEW; l++) {
                    real x = TRUNC(row[k + l] * per);
                    sums[k + l] += x;
                    q[l] += (double)x * x;
                }
            for (; k < width; k++) {
                real x = TRUNC(row[k] * per);
                sums[k] += x;
                q[0] += (double)x * x;
            }
            for (int l = 0; l < FEW; l++) squares[i] += q[l];
        }
    }
}

/* total += sum of weights_i row_i: within strips of STRIP rows in this kind of number, or `exactly` in double throughout.
   squares_i is the sum of row i's squares, PART / FEW of them at a time in this kind of number, beyond that in double. A
   row of weight 0 is not looked at. Eight rows at a time: each sum is then read and written once for all of them. */
#define TAKE(k, l)                                                                                                     \
    (sums[k] = sums[k] + w[0] * r0[k] + w[1] * r1[k] + w[2] * r2[k] + w[3] * r3[k] + w[4] * r4[k] + w[5] * r5[k] +     \
               w[6] * r6[k] + w[7] * r7[k],                                                                            \
     q[0][l] += r0[k] * r0[k], q[1][l] += r1[k] * r1[k], q[2][l] += r2[k] * r2[k], q[3][l] += r3[k] * r3[k],           \
     q[4][l] += r4[k] * r4[k], q[5][l] += r5[k] * r5[k], q[6][l] += r6[k] * r6[k], q[7][l] += r7[k] * r7[k])
#define SUM_ROWS(name, kind)                                                                                           \
FAST void NAMED(name)(const real *restrict rows, const real *restrict weights, long n, long d, long stride,            \
                      double *restrict total, double *restrict squares) {                                              \
    static const real nothing[COLUMNS] = {0};                                                                          \
    memset(squares, 0, n * sizeof *squares);                                                                           \
    for (long first = 0; first < n; first += STRIP) {                                                                  \
        long last = n - first < STRIP ? n : first + STRIP, some[STRIP], count = 0;                                     \
        for (long i = first; i < last; i++)                                                                            \
            if (weights[i] != 0) some[count++] = i;                                                                    \
        for (long begin = 0; begin < d; begin += COLUMNS) {                                                            \
            long width = d - begin < COLUMNS ? d - begin : COLUMNS;                                                    \
            kind sums[COLUMNS] = {0};                                                                                  \
            for (long at = 0; at < count; at += 8) {                                                                   \
                const real *row[8];                                                                                    \
                kind w[8];                                                                                             \
                for (int j = 0; j < 8; j++) {                                                                          \
                    row[j] = at + j < count ? rows + some[at + j] * stride + begin : nothing;                          \
                    w[j] = at + j < count ? weights[some[at + j]] : 0;                                                 \
                }                                                                                                      \
                const real *restrict r0 = row[0], *restrict r1 = row[1], *restrict r2 = row[2], *restrict r3 = row[3]; \
                const real *restrict r4 = row[4], *restrict r5 = row[5], *restrict r6 = row[6], *restrict r7 = row[7]; \
                for (long k = 0; k < width;) {                                                                         \
                    long end = width - k < PART ? width : k + PART;                                                    \
                    real q[8][FEW] = {{0}};                                                                            \
                    for (; k + FEW <= end; k += FEW)                                                                   \
                        for (int l = 0; l < FEW; l++) TAKE(k + l, l);                                                  \
                    for (int l = 0; k < end; k++, l++) TAKE(k, l);                                                     \
                    for (int j = 0; j < 8 && at + j < count; j++)                                                      \
                        for (int l = 0; l < FEW; l++) squares[some[at + j]] += q[j][l];                                \
                }                                                                                                      \
            }                                                                                                          \
            for (long k = 0; k < width; k++) total[begin + k] += sums[k];                                              \
        }                                                                                                              \
    }                                                                                                                  \
}

SUM_ROWS(sum_rows, real)
SUM_ROWS(sum_rows_exactly, double)
#undef SUM_ROWS
#undef TAKE

/* Convolutions of few channels. A row of the kernel meets w * c numbers that lie side by side in an image. */

typedef real NAMED(vector) __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
#define VECTOR NAMED(vector)
#define WIDE ((long)(BYTES / sizeof(real)))
#define ROUND(n) (((n) + WIDE - 1) / WIDE * WIDE)
#define LOAD(p) (*(const VECTOR *)(p))

/* Copies an image into one whose border is zero already; returns that, or the image itself if it needs no border. */
INLINE const real *NAMED(bordered)(const convolution *k, const real *image, real *copy) {
    if (k->top == 0 && k->left == 0) return image;
    long row = k->width * k->c, padded = (k->width + 2 * k->left) * k->c;
    for (long y = 0; y < k->height; y++)
        memcpy(copy + (y + k->top) * padded + k->left * k->c, image + y * row, row * sizeof *copy);
    return copy;
}

/* Where each result's kernel begins in a bordered image; some more of the last, so that blocks of pixels are whole. */
INLINE void NAMED(find_places)(const convolution *k, int64_t *places) {
    long pixels = k->high * k->wide, row = (k->width + 2 * k->left) * k->c;
    for (long y = 0, i = 0; y < k->high; y++)
        for (long x = 0; x < k->wide; x++, i++) places[i] = y * k->down * row + x * k->right * k->c;
    for (int i = 0; i < SUMS; i++) places[pixels + i] = places[pixels - 1];
}

/* z at `pixels` places, for `vectors` vectors of channels from the first on: bias + sum over taps of a weight. */
INLINE void NAMED(pixel_sums)(const int vectors, const int pixels, const convolution *k, const real *a,
                              const int64_t *places, const real *weight, const real *bias, long channels, real *z,
                              long apart) {
    VECTOR sums[SUMS];
    const real *at[SUMS];
    long taps = k->w * k->c, row = (k->width + 2 * k->left) * k->c;
    for (int p = 0; p < pixels; p++) {
        at[p] = a + places[p];
        for (int v = 0; v < vectors; v++) sums[p * vectors + v] = LOAD(bias + v * WIDE);
    }
    for (long y = 0; y < k->h; y++) {
        for (long t = 0; t < taps; t++, weight += channels)
            for (int p = 0; p < pixels; p++)
                for (int v = 0; v < vectors; v++) sums[p * vectors + v] += LOAD(weight + v * WIDE) * at[p][t];
        for (int p = 0; p < pixels; p++) at[p] += row;
    }
    for (int p = 0; p < pixels; p++)
        for (int v = 0; v < vectors; v++) *(VECTOR *)(z + p * apart + v * WIDE) = sums[p * vectors + v];
}

FAST void NAMED(convolve)(const real *restrict a, const real *restrict weight, const real *restrict bias, long stride,
                          const convolution *k, long relu, real *restrict image, real *restrict packed,
                          int64_t *restrict places, real *restrict z) {
    long channels = ROUND(k->o), taps = k->h * k->w * k->c, pixels = k->high * k->wide;
    real *own = packed + taps * channels, *out = own + channels;
    memset(image, 0, (k->height + 2 * k->top) * (k->width + 2 * k->left) * k->c * sizeof *image);
    memset(packed, 0, (taps + 1) * channels * sizeof *packed);
    NAMED(find_places)(k, places);
    for (long i = 0; i < k->clients * k->each; i++, a += k->height * k->width * k->c, z += pixels * k->o) {
        if (i == 0 || (i % k->each == 0 && stride)) {
            const real *w = weight + i / k->each * stride;
            for (long o = 0; o < k->o; o++) {
                if (bias) own[o] = bias[i / k->each * stride + o];
                for (long c = 0; c < k->c; c++)
                    for (long t = 0; t < k->h * k->w; t++) packed[(t * k->c + c) * channels + o] = *w++;
            }
        }
        const real *seen = NAMED(bordered)(k, a, image);
        for (long o = 0; o < channels;) {
            int vectors = channels - o > WIDE ? 2 : 1, together = vectors == 2 ? SUMS / 2 : 8;
            long filled = k->o - o < vectors * WIDE ? k->o - o : vectors * WIDE;
            for (long first = 0; first < pixels; first += together) {
                long count = pixels - first < together ? pixels - first : together;
                int whole = filled == vectors * WIDE && count == together;
                real *to = whole ? z + first * k->o + o : out;
                long apart = whole ? k->o : channels;
                if (vectors == 2)
                    NAMED(pixel_sums)(2, SUMS / 2, k, seen, places + first, packed + o, own + o, channels, to, apart);
                else NAMED(pixel_sums)(1, 8, k, seen, places + first, packed + o, own + o, channels, to, apart);
                for (long p = 0; p < count && !whole; p++)
                    memcpy(z + (first + p) * k->o + o, out + p * channels, filled * sizeof *z);
            }
            o += vectors * WIDE;
        }
        for (long j = 0, all = relu ? pixels * k->o : 0; j < all; j++) {
            real value = z[j];
            z[j] = value < 0 ? 0 : value;
        }
    }
}

/* Copies what comes back to `pixels` pixels of o channels, `channels` apart in the copy; nothing comes back where z is
   given, the result, and was cut off at zero. */
INLINE void NAMED(taken)(const real *restrict delta, const real *restrict z, long pixels, long o, long channels,
                         real *restrict copy) {
    if (channels == o) o = channels = pixels * o, pixels = 1;
    for (long i = 0; i < pixels; i++, delta += o, copy += channels) {
        if (z)
            for (long j = 0; j < o; j++) {
                real value = delta[j];
                copy[j] = z[i * o + j] <= 0 ? 0 : value;
            }
        else memcpy(copy, delta, o * sizeof *copy);
    }
}

/* Adds to an image what comes back from `count` of `pixels` pixels through `vectors` vectors of a row of the kernel. */
INLINE void NAMED(pixels_back)(const int vectors, const int pixels, long count, const real *delta, long o,
                               const real *weight, long wide, real *image, const int64_t *places) {
    VECTOR sums[SUMS];
    const real *at[SUMS];
    for (int p = 0; p < pixels; p++) {
        at[p] = delta + (p < count ? p : count - 1) * o;
        for (int v = 0; v < vectors; v++) sums[p * vectors + v] = (VECTOR){0};
    }
    for (long i = 0; i < o; i++, weight += wide)
        for (int p = 0; p < pixels; p++)
            for (int v = 0; v < vectors; v++) sums[p * vectors + v] += LOAD(weight + v * WIDE) * at[p][i];
    for (int p = 0; p < pixels; p++)
        if (p < count)
            for (int v = 0; v < vectors; v++) *(VECTOR *)(image + places[p] + v * WIDE) += sums[p * vectors + v];
}

FAST void NAMED(convolve_back)(const real *restrict delta, const real *restrict z, const real *restrict weight,
                               long stride, const convolution *k, real *restrict image, real *restrict packed,
                               int64_t *restrict places, real *restrict result) {
    long run = k->w * k->c, wide = ROUND(run), pixels = k->high * k->wide;
    long row = (k->width + 2 * k->left) * k->c, size = (k->height + 2 * k->top) * row;
    memset(packed, 0, k->h * k->o * wide * sizeof *packed);
    real *masked = packed + k->h * k->o * wide;
    NAMED(find_places)(k, places);
    for (long i = 0; i < k->clients * k->each; i++, delta += pixels * k->o) {
        const real *back = z ? masked : delta;
        if (z) NAMED(taken)(delta, z + i * pixels * k->o, pixels, k->o, k->o, masked);
        if (i == 0 || (i % k->each == 0 && stride)) {
            const real *w = weight + i / k->each * stride;
            for (long o = 0; o < k->o; o++)
                for (long c = 0; c < k->c; c++)
                    for (long y = 0; y < k->h; y++)
                        for (long x = 0; x < k->w; x++) packed[(y * k->o + o) * wide + x * k->c + c] = *w++;
        }
        memset(image, 0, size * sizeof *image);
        for (long y = 0; y < k->h; y++)
            for (long t = 0; t < wide;) {
                long left = (wide - t) / WIDE;
                int vectors = left >= 3 && left != 4 ? 3 : left >= 2 ? 2 : 1;
                int together = vectors == 1 ? 8 : SUMS / vectors;
                const real *w = packed + y * k->o * wide + t;
                real *to = image + y * row + t;
                for (long first = 0; first < pixels; first += together) {
                    const real *d = back + first * k->o;
                    long count = pixels - first < together ? pixels - first : together;
                    if (vectors == 3) NAMED(pixels_back)(3, 4, count, d, k->o, w, wide, to, places + first);
                    else if (vectors == 2) NAMED(pixels_back)(2, 6, count, d, k->o, w, wide, to, places + first);
                    else NAMED(pixels_back)(1, 8, count, d, k->o, w, wide, to, places + first);
                }
                t += vectors * WIDE;
            }
        for (long y = 0; y < k->height; y++, result += k->width * k->c)
            memcpy(result, image + (y + k->top) * row + k->left * k->c, k->width * k->c * sizeof *result);
    }
}

/* sums += products of `taps` numbers of the images with `vectors` vectors of what comes back, over rows of each. */
INLINE void NAMED(tap_sums)(const int vectors, const int taps, const convolution *k, const real *a, const real *delta,
                            long images, long rows, long size, long channels, double *sums) {
    VECTOR some[SUMS];
    long step = k->right * k->c, row = k->down * (k->width + 2 * k->left) * k->c;
    for (int t = 0; t < taps * vectors; t++) some[t] = (VECTOR){0};
    for (long i = 0; i < images; i++, a += size, delta += k->high * k->wide * channels)
        for (long y = 0; y < rows; y++) {
            const real *p = a + y * row, *d = delta + y * k->wide * channels;
            for (long x = 0; x < k->wide; x++, p += step, d += channels)
                for (int t = 0; t < taps; t++)
                    for (int v = 0; v < vectors; v++) some[t * vectors + v] += LOAD(d + v * WIDE) * p[t];
        }
    for (int t = 0; t < taps; t++)
        for (int v = 0; v < vectors; v++)
            for (int l = 0; l < WIDE; l++) sums[t * channels + v * WIDE + l] += some[t * vectors + v][l];
}

/* Images are taken `together` at a time, as many as have AREA pixels; large ones in parts of as many rows. Row by row
   of the kernel, up to SUMS vectors of sums stay in registers while all pixels of a part pass by. */
FAST void NAMED(convolve_weights)(const real *restrict a, const real *restrict delta, const real *restrict z,
                                  const convolution *k, long together, real *restrict copies, real *restrict packed,
                                  double *restrict sums, real *restrict weight, real *restrict bias, long stride) {
    long channels = ROUND(k->o), taps = k->h * k->w * k->c, run = k->w * k->c, pixels = k->high * k->wide;
    long row = (k->width + 2 * k->left) * k->c, size = (k->height + 2 * k->top) * row;
    long rows = together > 1 || pixels <= AREA ? k->high : k->wide < AREA ? AREA / k->wide : 1;
    double *alone = sums + taps * channels;
    memset(copies, 0, together * size * sizeof *copies);
    if (channels != k->o) memset(packed, 0, together * pixels * channels * sizeof *packed);
    for (long client = 0; client < k->clients; client++, weight += stride, bias += bias ? stride : 0) {
        memset(sums, 0, (taps + 1) * channels * sizeof *sums);
        for (long first = 0; first < k->each; first += together) {
            long images = k->each - first < together ? k->each - first : together;
            const real *seen = a, *back = delta;
            for (long i = 0; i < images; i++) {
                const real *own = NAMED(bordered)(k, a + i * k->height * k->width * k->c, copies + i * size);
                if (i == 0) seen = own;
            }
            if (z || channels != k->o) {
                NAMED(taken)(delta, z, images * pixels, k->o, channels, packed);
                back = packed;
            }
            a += images * k->height * k->width * k->c, delta += images * pixels * k->o;
            z += z ? images * pixels * k->o : 0;
            for (long y = 0; y < k->high; y += rows) {
                long high = k->high - y < rows ? k->high - y : rows;
                for (long o = 0; o < channels;) {
                    const real *d = back + y * k->wide * channels + o;
                    int vectors = channels - o > WIDE ? 2 : 1;
                    long most = SUMS / vectors, parts = (run + most - 1) / most;
                    for (long j = 0; j < k->h * parts; j++) {
                        long begin = j % parts * run / parts, count = (j % parts + 1) * run / parts - begin;
                        const real *p = seen + (y * k->down + j / parts) * row + begin;
                        double *to = sums + (j / parts * run + begin) * channels + o;
#define SOME(v, t) case v * 16 + t: NAMED(tap_sums)(v, t, k, p, d, images, high, size, channels, to); break;
                        switch (vectors * 16 + count) {
                            SOME(1, 1) SOME(1, 2) SOME(1, 3) SOME(1, 4) SOME(1, 5) SOME(1, 6) SOME(1, 7) SOME(1, 8)
                            SOME(1, 9) SOME(1, 10) SOME(1, 11) SOME(1, 12)
                            SOME(2, 1) SOME(2, 2) SOME(2, 3) SOME(2, 4) SOME(2, 5) SOME(2, 6)
                        }
#undef SOME
                    }
                    o += vectors * WIDE;
                }
                if (bias) {
                    const real *d = back + y * k->wide * channels;
                    for (long o = 0; o < channels; o += WIDE) {
                        VECTOR some[4] = {{0}};
                        long p = 0, all = images * high * k->wide;
                        for (; p + 4 <= all; p += 4)
                            for (int j = 0; j < 4; j++) some[j] += LOAD(d + (p + j) * channels + o);
                        for (; p < all; p++) some[0] += LOAD(d + p * channels + o);
                        for (int j = 0; j < 4; j++)
                            for (int l = 0; l < WIDE; l++) alone[o + l] += some[j][l];
                    }
                }
            }
        }
        for (long o = 0; o < k->o; o++) {
            if (bias) bias[o] = alone[o];
            real *w = weight + o * taps;
            for (long c = 0; c < k->c; c++)
                for (long t = 0; t < k->h * k->w; t++) *w++ = sums[(t * k->c + c) * channels + o];
        }
    }
}
#undef LOAD
#undef ROUND
#undef WIDE
#undef VECTOR
