// Rows times rows of integers, for one instruction set: included once per namespace, which defines
//   HYBRID_RL_TARGET   the attribute of its functions
//   Vector, kStep      a register of int32 sums, and how many int16 go into one step of them
//   zero(), inputs(p), weights(p), add_products(sums, x, w), store_sums(sums[kColumns], totals)
// No pragma once.

// out[m, n] of kM rows of inputs and kColumns rows of weights. What is left of a row after whole steps is added one by
// one.
template <int kM>
HYBRID_RL_TARGET inline void tile(const Product& p, int64_t m, int64_t n) {
  const int16_t* x = p.inputs + m * p.stride;
  const int8_t* w = p.weights + n * p.size;
  Vector sums[kM][kColumns];
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) {
      sums[i][j] = zero();
    }
  }
  int64_t k = 0;
  for (; k + kStep <= p.size; k += kStep) {
    Vector rows[kM];
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      rows[i] = inputs(x + i * p.stride + k);
    }
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) {
      const Vector column = weights(w + j * p.size + k);
#pragma GCC unroll 8
      for (int i = 0; i < kM; ++i) {
        sums[i][j] = add_products(sums[i][j], rows[i], column);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
    int32_t totals[kColumns];
    store_sums(sums[i], totals);
    for (int64_t rest = k; rest < p.size; ++rest) {
      for (int j = 0; j < kColumns; ++j) {
        totals[j] += int32_t{x[i * p.stride + rest]} * int32_t{w[j * p.size + rest]};
      }
    }
    p.write(m + i, n, totals, kColumns);
  }
}

// All rows of inputs with the rows [begin, end) of weights, which stay in the cache.
HYBRID_RL_TARGET void multiply(const Product& p, int64_t begin, int64_t end) {
  const int64_t whole = end - (end - begin) % kColumns;
  int64_t m = 0;
  for (; m + 2 <= p.num_rows; m += 2) {
    for (int64_t n = begin; n < whole; n += kColumns) {
      tile<2>(p, m, n);
    }
  }
  for (; m < p.num_rows; ++m) {
    for (int64_t n = begin; n < whole; n += kColumns) {
      tile<1>(p, m, n);
    }
  }
  for (int64_t n = whole; n < end; ++n) {
    for (m = 0; m < p.num_rows; ++m) {
      int32_t total = 0;
      for (int64_t k = 0; k < p.size; ++k) {
        total += int32_t{p.inputs[m * p.stride + k]} * int32_t{p.weights[n * p.size + k]};
      }
      p.write(m, n, &total, 1);
    }
  }
}
