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

/* Per row: u <- u - v, and where the norm n of that is no oddity v <- v + beta f u with f = min(length(n), most) / n;
   length(n) is radius n / (n + parameter) or, where that is to be clipped, min(n, parameter). f is nan for an odd row. */
FAST void NAMED(feedback)(real *restrict u, real *restrict v, long rows, long d, long u_stride, long v_stride,
                          long clips, double parameter, double radius, double most, double beta,
                          real *restrict factors) {
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
        if (usual)
            for (long k = 0; k < d; k++) v[k] += step * u[k];
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
