// The kernels of matmul.h for one instruction set. few_rows.inl must come before and defines the blocks; this file
// needs interleave(a, b, low, high), which alternates the lanes of a and b.

using vectors::Product;

// The number of rows of a whose sums are in registers at once, two vectors each.
constexpr int64_t kRowsOfSums = kWidth / 2;

constexpr int64_t kDepthAtMost = 256;  // rows of b in a panel of one block

// The number of blocks of columns that are multiplied at once: as many as leave half of the registers free.
constexpr int blocks_of(int rows) { return streams_of(rows) > 1 ? streams_of(rows) / 2 : 1; }

// The partition of a product into passes of rows of a, groups of blocks of columns, and panels of rows of b.
struct Cut {
  int64_t rows, blocks, depth;
  bool packs;  // true if panels are copied, so that their rows are adjacent
};

// A few rows are multiplied with all columns, so that b is read, or the result of a short product written, in memory
// order. Rows of b then lie in pages of their own, and a processor keeps track of some hundreds of pages. With many
// rows, a panel and the sums of its group stay in L1 and L2.
FUSED_MLP_INLINE Cut cut_of(const Product& product, int64_t blocks) {
  constexpr int64_t kShort = 64;
  if (product.rows <= kRowsOfSums) return {kRowsOfSums, blocks, kShort, product.by_columns};
  if (product.depth <= kShort && !product.by_columns) return {kRowsOfSums, blocks, kShort, false};
  constexpr int64_t kRowsOfPass = 256, kBlocksOfGroup = 4;
  return {kRowsOfPass, blocks < kBlocksOfGroup ? blocks : kBlocksOfGroup, kDepthAtMost, true};
}

// A panel of b: rows of it, in some blocks of columns.
template <typename T>
struct Panel {
  const T* block[4];
  int64_t row_stride;
  int64_t depth;
};

// Rows of a, in float32.
struct Factors {
  const float* data;
  int64_t row_step, depth_step;
};

// Multiplies rows of a with a panel of b, and passes the sums to finish(): (row, block, pair).
template <typename T, int kRows, int kBlocks, typename Finish>
FUSED_MLP_INLINE void multiply_panel(Factors a, const Panel<T>& panel, const Finish& finish) {
  Vec found[kRows][kBlocks][2] = {};
  for (int64_t k = 0; k < panel.depth; ++k) {
    Pair values[kBlocks];
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) {
      const T* const at = panel.block[i] + k * panel.row_stride;
      __builtin_prefetch(at + kBlocks * kBlock);
      values[i] = load(at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = splat(a.data[r * a.row_step + k * a.depth_step]);
#pragma GCC unroll 4
      for (int i = 0; i < kBlocks; ++i) {
        found[r][i][0] += factor * values[i].half[0];
        found[r][i][1] += factor * values[i].half[1];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks; ++i) finish(r, i, Pair{{found[r][i][0], found[r][i][1]}});
  }
}

// A panel's part of some rows of the result, from a given row and block. Until the last panel, sums are in separate
// memory with `stride` elements per row, because the rows of a result often share an L1 set.
struct Part {
  const Product* product;
  int64_t row, block;
  float* sums;
  int64_t stride;
  bool is_first, is_last;
};

template <typename T>
FUSED_MLP_INLINE void add(Pair& sum, const T* from) {
  const Pair earlier = load(from);
  for (int h = 0; h < 2; ++h) sum.half[h] += earlier.half[h];
}

template <typename T, int kRows, int kBlocks>
void multiply_part(const Part& part, Factors a, const Panel<T>& panel) {
  const Product& product = *part.product;
  multiply_panel<T, kRows, kBlocks>(a, panel, [&](int r, int i, Pair sum) __attribute__((always_inline)) {
    float* const at = part.sums + r * part.stride + i * kBlock;
    if (!part.is_first) add(sum, at);
    if (!part.is_last) return store(at, sum);
    const BlockOf block(product.cols, part.block + i);
    if (product.accumulate) add(sum, row<T>(product.out, part.row + r) + block.begin);
    store_block<T>(product.out, part.row + r, block, sum);
  });
}

FUSED_MLP_INLINE void transpose(Vec (&rows)[kWidth]) {
  for (int round = 1; round < kWidth; round *= 2) {
    Vec shuffled[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      interleave(rows[i], rows[i + kWidth / 2], shuffled[2 * i], shuffled[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) rows[i] = shuffled[i];
  }
}

// Transposes a panel of weights [cols, depth] into rows of a block's columns.
FUSED_MLP_INLINE void pack(const float* weights, int64_t row_stride, int64_t depth, float* panel) {
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t k = 0; k < depth; k += kWidth) {
      Vec rows[kWidth] = {};
      for (int r = 0; r < kWidth; ++r) {
        const float* const from = weights + (h * kWidth + r) * row_stride + k;
        if (depth - k >= kWidth) {
          __builtin_memcpy(&rows[r], from, sizeof(Vec));
        } else {
          __builtin_memcpy(&rows[r], from, (depth - k) * sizeof(float));
        }
      }
      transpose(rows);
      for (int r = 0; r < kWidth; ++r) __builtin_memcpy(panel + (k + r) * kBlock + h * kWidth, &rows[r], sizeof(Vec));
    }
  }
}

FUSED_MLP_INLINE void pack(const BFloat16* weights, int64_t row_stride, int64_t depth, BFloat16* panel) {
  for (int64_t c = 0; c < kBlock; ++c) {
    for (int64_t k = 0; k < depth; ++k) panel[k * kBlock + c] = weights[c * row_stride + k];
  }
}

template <typename T>
FUSED_MLP_INLINE void copy_rows(const T* from, int64_t row_stride, int64_t depth, T* panel) {
  for (int64_t k = 0; k < depth; ++k) __builtin_memcpy(panel + k * kBlock, from + k * row_stride, kBlock * sizeof(T));
}

template <typename T>
Panel<T> panel_of(const Product& product, bool packs, int64_t depth, int64_t count, int64_t block, int64_t blocks,
                  T* packed) {
  Panel<T> panel{{}, packs ? kBlock : product.b.row_stride, count};
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t column = BlockOf(product.cols, block + i).begin;
    T* const to = packed + i * count * kBlock;
    if (product.by_columns) {
      pack(row<T>(product.b, column) + depth, product.b.row_stride, count, to);
    } else if (packs) {
      copy_rows(row<T>(product.b, depth) + column, product.b.row_stride, count, to);
    }
    panel.block[i] = packs ? to : row<T>(product.b, depth) + column;
  }
  return panel;
}

FUSED_MLP_INLINE int64_t sums_size(const Product& product, const Cut& cut) {
  if (product.depth <= cut.depth) return 0;
  return (product.rows < cut.rows ? product.rows : cut.rows) * (cut.blocks | 1) * kBlock;
}

static int64_t scratch_size(const Product& product, int64_t blocks) {
  const Cut cut = cut_of(product, blocks);
  return sums_size(product, cut) + (product.dtype == DType::kFloat32 ? 0 : cut.rows * cut.depth);
}

// Rows of a, `count` of their elements from `depth`; bf16 is widened to memory.
template <typename T>
FUSED_MLP_INLINE Factors factors_of(const Product& product, int64_t begin, int64_t rows, int64_t depth, int64_t count,
                                    float* wide) {
  const int64_t row_step = product.a_row_step, depth_step = product.a_depth_step;
  const T* const a = static_cast<const T*>(product.a) + begin * row_step + depth * depth_step;
  if constexpr (kIsBf16<T>) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < count; ++k) wide[r * count + k] = widened(a[r * row_step + k * depth_step]);
    }
    return {wide, count, 1};
  } else {
    return {a, row_step, depth_step};
  }
}

template <typename T>
void multiply_as(const Product& product, int64_t begin, int64_t end, int64_t first, int64_t last, float* scratch) {
  alignas(64) T packed[kDepthAtMost * kBlock];
  const Cut cut = cut_of(product, last - first);
  const int64_t stride = (cut.blocks | 1) * kBlock;
  float* const wide = scratch + sums_size(product, cut);
  const int64_t passes = ceil_div(end - begin, cut.rows);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t row = begin + (end - begin) * pass / passes;
    const int64_t rows = begin + (end - begin) * (pass + 1) / passes - row, parts = ceil_div(rows, kRowsOfSums);
    for (int64_t group = first; group < last; group += cut.blocks) {
      const int64_t group_end = last - group < cut.blocks ? last : group + cut.blocks;
      for (int64_t depth = 0; depth < product.depth; depth += cut.depth) {
        const int64_t count = product.depth - depth < cut.depth ? product.depth - depth : cut.depth;
        const Factors a = factors_of<T>(product, row, rows, depth, count, wide);
        for (int64_t block = group, blocks = 1; block < group_end; block += blocks) {
          blocks = 1;
          visit_rows<kRowsOfSums>(rows, [&]<int kRows>() {
            if (cut.rows == kRowsOfSums && block + blocks_of(kRows) <= group_end) blocks = blocks_of(kRows);
          });
          const Panel<T> panel = panel_of(product, cut.packs, depth, count, block, blocks, packed);
          for (int64_t p = 0; p < parts; ++p) {  // after the first part the panel is in a cache
            const int64_t from = rows * p / parts, some = rows * (p + 1) / parts - from;
            float* const sums = scratch + from * stride + (block - group) * kBlock;
            const Part part{&product, row + from, block, sums, stride, depth == 0, depth + count == product.depth};
            const Factors of_part{a.data + from * a.row_step, a.row_step, a.depth_step};
            visit_rows<kRowsOfSums>(some, [&]<int kRows>() {
              if (blocks == 1) {
                multiply_part<T, kRows, 1>(part, of_part, panel);
              } else {
                multiply_part<T, kRows, blocks_of(kRows)>(part, of_part, panel);
              }
            });
          }
        }
      }
    }
  }
}

static void multiply(const Product& product, int64_t begin, int64_t end, int64_t first, int64_t last, float* scratch) {
  const auto multiply = product.dtype == DType::kFloat32 ? multiply_as<float> : multiply_as<BFloat16>;
  multiply(product, begin, end, first, last, scratch);
}

const vectors::Kernels kProducts = {kBlock, scratch_size, multiply};
