// The main loop of every GEMM of sm_80: a ring of shared memory stages. All threads fill it by cp.async some blocks of
// k ahead. The warps load fragments by ldmatrix, also one step ahead, and multiply them by mma.sync.
//
// Rows of a stage are consecutive, block_k elements each. Their 16-byte chunks are swizzled, so that the eight rows of
// one column of chunks that ldmatrix reads at a time lie in distinct banks. Sides may also be read in transposed
// layout, [k, n] or [k, m]: then a stage has a row for each of block_k, and ldmatrix transposes.
#pragma once

#include "../../torch-ext/operands/matrix.h"
#include "ptx.cuh"
#include "shape.h"

namespace fused_mlp::sm80 {

constexpr int kPieceBytes = 16;
constexpr int kPiece = kPieceBytes / 2;  // elements
constexpr int kMmaM = 16;
constexpr int kMmaN = 8;
constexpr int kMmaK = 16;

// The position of chunk `piece` of row `row`, in rows of kRowBytes. The swizzle repeats every eight rows.
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  constexpr int kPieces = kRowBytes / kPieceBytes < 8 ? kRowBytes / kPieceBytes : 8;  // chunks that are permuted
  constexpr int kRowsOfLine = 8 / kPieces;  // rows of a 128-byte line, which covers all banks once
  return row * kRowBytes + (piece ^ row / kRowsOfLine % kPieces) * kPieceBytes;
}

template <typename Element_, int kRowsM_, int kRowsN_, int kBlockK_, int kWarpsM_, int kWarpsN_, int kWarpsK_,
          int kStages_, bool kLies_ = false, bool kLiesM_ = false>
struct CtaTile {
  using Element = Element_;
  static constexpr Shape kShape{kRowsM_, kRowsN_, kBlockK_, kWarpsM_, kWarpsN_, kWarpsK_, kStages_};
  static constexpr int kRowsM = kRowsM_;
  static constexpr int kRowsN = kRowsN_;
  static constexpr int kBlockK = kBlockK_;
  static constexpr int kWarpsM = kWarpsM_;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kWarpsK = kWarpsK_;
  static constexpr int kStages = kStages_;
  static constexpr bool kLies = kLies_;    // true if the N side is [k, n]
  static constexpr bool kLiesM = kLiesM_;  // true if the M side is [k, m]
  static constexpr int kThreads = kShape.threads();
  static constexpr int kRowBytes = kBlockK * 2;
  static constexpr int kLyingRowBytes = kRowsN * 2;
  static constexpr int kStageBytes = kShape.stage_bytes();

  static constexpr int kWarpRowsM = kRowsM / kWarpsM;
  static constexpr int kWarpRowsN = kRowsN / kWarpsN;
  static constexpr int kWarpStepM = kWarpRowsM;       // from a warp's first row of the M side to the next warp's
  static constexpr int kTileStepM = kMmaM;            // from tile to tile of a warp
  static constexpr int kTilesM = kWarpRowsM / kMmaM;  // tiles of a warp
  static constexpr int kTilesN = kWarpRowsN / kMmaN;
  static constexpr int kSteps = kBlockK / kMmaK / kWarpsK;  // steps that a warp takes in a block
  // A block's copies are spread over the steps before the one that waits for the next block.
  static constexpr int kLoadSteps = kSteps > 1 ? kSteps - 1 : 1;

  static_assert(kWarpRowsM % kMmaM == 0 && kWarpRowsN % kMmaN == 0 && kBlockK % (kMmaK * kWarpsK) == 0);
  static_assert(kStages >= 2);
};

// The same, with tiles of the M side assigned to warps in round-robin order, so that they share partially filled sets
// of rows.
template <typename Tile>
struct InTurns : Tile {
  static constexpr int kWarpStepM = kMmaM;
  static constexpr int kTileStepM = kMmaM * Tile::kWarpsM;
};

template <typename Tile>
using Accumulator = float[Tile::kTilesM][Tile::kTilesN][4];

// This thread's part of the copies of one side: chunks of the same column of chunks, from rows that are a pass apart.
// With kSkips, missing rows are filled with zeros and not read.
template <typename Tile, int kRows, bool kSkips = false>
struct SideLoader {
  using Element = typename Tile::Element;
  static constexpr int kPieces = Tile::kBlockK / kPiece;  // chunks of a row
  static constexpr int kRowsOfPass = Tile::kThreads / kPieces;
  static constexpr int kPasses = (kRows + kRowsOfPass - 1) / kRowsOfPass;
  static_assert(kRowsOfPass % 8 == 0, "the swizzle is the same in each pass");

  const Element* source[kPasses];
  int rows;  // number of existing rows

  __device__ __forceinline__ static int row() { return threadIdx.x / kPieces; }
  __device__ __forceinline__ static int piece() { return threadIdx.x % kPieces; }

  // row_of(i) returns the start of row i; for a row past the end, that of some row of the matrix.
  template <typename RowOf>
  __device__ __forceinline__ explicit SideLoader(RowOf&& row_of, int rows = kRows) : rows(rows) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int tile_row = pass * kRowsOfPass + row();
      source[pass] = row_of(tile_row < kRows ? tile_row : kRows - 1) + piece() * kPiece;
      if constexpr (Tile::kLies) keep(source[pass]);
    }
  }

  // Copies every kOf-th pass, starting with pass `first`, of the block that begins at element `begin` of k.
  template <int kOf>
  __device__ __forceinline__ void load(uint32_t side, int begin, int k, int first) const {
    const uint32_t shared = side + swizzled<Tile::kRowBytes>(row(), piece());
    const bool present = begin + piece() * kPiece < k;
    const int offset = present ? begin : 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass % kOf != first) continue;
      if (kRows % kRowsOfPass == 0 || pass * kRowsOfPass + row() < kRows) {
        const bool skipped = kSkips && pass * kRowsOfPass + row() >= rows;
        cp_async_16(shared + pass * kRowsOfPass * Tile::kRowBytes, source[pass] + offset, present && !skipped);
      }
    }
  }
};

// The same for a side in the layout [k, n] or [k, m]: its rows are elements of k. Blocks must be requested in order,
// and in each block the first passes first.
template <typename Tile, int kColumns = Tile::kRowsN>
struct LyingLoader {
  using Element = typename Tile::Element;
  static constexpr int kPieces = kColumns / kPiece;  // chunks of a row
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kRowsOfPass = Tile::kThreads / kPieces;
  static constexpr int kPasses = Tile::kBlockK / kRowsOfPass;
  static_assert(kRowsOfPass % 8 == 0 && Tile::kBlockK % kRowsOfPass == 0);

  const Element* source;  // source of this thread's next copy
  int64_t step;           // to the copy after it

  __device__ __forceinline__ static int row() { return threadIdx.x / kPieces; }
  __device__ __forceinline__ static int piece() { return threadIdx.x % kPieces; }

  // `column` is the column of this thread's chunks.
  __device__ __forceinline__ LyingLoader(const Matrix& matrix, int column)
      : source(static_cast<const Element*>(matrix.data) + row() * matrix.row_stride + column),
        step(kRowsOfPass * matrix.row_stride) {}

  template <int kOf>
  __device__ __forceinline__ void load(uint32_t side, int begin, int k, int first) {
    const uint32_t shared = side + swizzled<kRowBytes>(row(), piece());
    const int left = k - begin - row();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass * kOf / kPasses != first) continue;
      cp_async_16(shared + pass * kRowsOfPass * kRowBytes, source, pass * kRowsOfPass < left);
      source += step;
    }
  }
};

template <typename Tile>
struct Fragments {
  uint32_t m[Tile::kTilesM][4];
  uint32_t n[Tile::kTilesN][2];
};

// The position of a warp in its CTA.
template <typename Tile>
struct WarpPlace {
  int m, n, k;
  __device__ __forceinline__ explicit WarpPlace(int warp)
      : m(warp % Tile::kWarpsM), n(warp / Tile::kWarpsM % Tile::kWarpsN), k(warp / (Tile::kWarpsM * Tile::kWarpsN)) {}
};

// The positions of this lane's rows in a stage, for ldmatrix.
template <typename Tile>
struct FragmentReader {
  static constexpr int kLyingRowBytesM = Tile::kRowsM * 2;
  uint32_t m, n;  // offsets in a stage, at the warp's first step

  __device__ __forceinline__ explicit FragmentReader(const WarpPlace<Tile>& warp) {
    const int lane = threadIdx.x % 32;
    const uint32_t first_step = step_bits(warp.k * Tile::kSteps);
    m = Tile::kLiesM
            ? swizzled<kLyingRowBytesM>(lane / 16 * 8 + lane % 8, warp.m * Tile::kWarpStepM / kPiece + lane / 8 % 2)
            : swizzled<Tile::kRowBytes>(warp.m * Tile::kWarpStepM + lane % 16, lane / 16) ^ first_step;
    n = Tile::kLies ? swizzled<Tile::kLyingRowBytes>(lane % 16, warp.n * Tile::kWarpRowsN / kPiece + lane / 16)
                    : swizzled<Tile::kRowBytes>(warp.n * Tile::kWarpRowsN + lane / 16 * 8 + lane % 8, lane / 8 % 2) ^
                          first_step;
  }

  // A step is two chunks. It changes bits of the offset within a row, and the swizzle is an XOR of the same bits.
  __device__ __forceinline__ static uint32_t step_bits(int step) { return step * 2 * kPieceBytes; }

  // Reads the M side, for the first kCount tiles.
  template <int kCount = Tile::kTilesM>
  __device__ __forceinline__ void read(Fragments<Tile>& fragments, uint32_t stage, int step) const {
    const uint32_t side_m = stage + (m ^ step_bits(step));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t (&tile)[4] = fragments.m[i];
      if constexpr (Tile::kLiesM) {
        static_assert(Tile::kWarpRowsM <= 8 * kPiece && Tile::kTileStepM == kMmaM && Tile::kWarpsK == 1);
        const uint32_t columns = m ^ i * kMmaM / kPiece * kPieceBytes;
        load_matrix_x4_transposed(stage + step * kMmaK * kLyingRowBytesM + columns, tile[0], tile[1], tile[2], tile[3]);
      } else {
        load_matrix_x4(side_m + i * Tile::kTileStepM * Tile::kRowBytes, tile[0], tile[1], tile[2], tile[3]);
      }
    }
    if constexpr (Tile::kLies) {
      read_lying(fragments, stage + Tile::kRowsM * Tile::kRowBytes + step * kMmaK * Tile::kLyingRowBytes);
      return;
    }
    const uint32_t side_n = stage + Tile::kRowsM * Tile::kRowBytes + (n ^ step_bits(step));
#pragma unroll
    for (int j = 0; j + 1 < Tile::kTilesN; j += 2) {
      uint32_t (&even)[2] = fragments.n[j];
      uint32_t (&odd)[2] = fragments.n[j + 1];
      load_matrix_x4(side_n + j * kMmaN * Tile::kRowBytes, even[0], even[1], odd[0], odd[1]);
    }
    if constexpr (Tile::kTilesN % 2 == 1) {
      uint32_t (&last)[2] = fragments.n[Tile::kTilesN - 1];
      load_matrix_x2(side_n + (Tile::kTilesN - 1) * kMmaN * Tile::kRowBytes, last[0], last[1]);
    }
  }

  // Columns are bits of the offset within a row, and the swizzle is an XOR of the same bits.
  __device__ __forceinline__ void read_lying(Fragments<Tile>& fragments, uint32_t side) const {
    static_assert(!Tile::kLies || (Tile::kTilesN <= 8 && Tile::kTilesN % 2 == 0 && Tile::kWarpsK == 1));
#pragma unroll
    for (int j = 0; j < Tile::kTilesN; j += 2) {
      uint32_t (&even)[2] = fragments.n[j];
      uint32_t (&odd)[2] = fragments.n[j + 1];
      load_matrix_x4_transposed(side + (n ^ j * kPieceBytes), even[0], even[1], odd[0], odd[1]);
    }
  }
};

// Multiplies the first kCount tiles of the warp's rows.
template <typename Tile, int kCount = Tile::kTilesM>
__device__ __forceinline__ void multiply_step(Accumulator<Tile>& sums, const Fragments<Tile>& fragments) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int each = 0; each < Tile::kTilesN; ++each) {
      const int j = i % 2 == 0 ? each : Tile::kTilesN - 1 - each;  // back and forth: each turn reuses a fragment
      Mma<typename Tile::Element>::multiply(sums[i][j], fragments.m[i], fragments.n[j]);
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void clear(Accumulator<Tile>& sums) {
#pragma unroll
  for (int i = 0; i < Tile::kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kTilesN; ++j) sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0.0f;
  }
}

// Copies every kOf-th pass of a block, starting with pass `first`, into a stage.
template <int kOf, typename Tile, typename LoaderM, typename LoaderN>
__device__ __forceinline__ void load_block(uint32_t stage, LoaderM& loader_m, LoaderN& loader_n, int block, int k,
                                           int first) {
  loader_m.template load<kOf>(stage, block * Tile::kBlockK, k, first);
  loader_n.template load<kOf>(stage + Tile::kRowsM * Tile::kRowBytes, block * Tile::kBlockK, k, first);
}

// Fills all stages but the last, in which nothing is copied before multiply(). Earlier copies of the thread arrive with
// the first block. Every block is a group of copies. Stages without a block get an empty group, so that the number of
// groups after a block's is always the same.
template <typename Tile, typename LoaderM, typename LoaderN>
__device__ __forceinline__ void fill(uint32_t ring, LoaderM& loader_m, LoaderN& loader_n, int k) {
#pragma unroll
  for (int block = 0; block < Tile::kStages - 1; ++block) {
    if (block * Tile::kBlockK < k) {
      load_block<1, Tile>(ring + block * Tile::kStageBytes, loader_m, loader_n, block, k, 0);
    }
    cp_async_commit();
  }
}

// sums += M N^T over k elements, of the rows from the loaders with which the ring was filled; of each warp's rows of M
// the first kCount tiles. On return the ring is free, and no copy is in flight.
template <typename Tile, int kCount = Tile::kTilesM, typename LoaderM, typename LoaderN>
__device__ __forceinline__ void multiply(uint32_t ring, LoaderM& loader_m, LoaderN& loader_n,
                                         const WarpPlace<Tile>& warp, int k, Accumulator<Tile>& sums) {
  constexpr uint32_t kRingBytes = Tile::kShape.ring_bytes();
  const int blocks = (k + Tile::kBlockK - 1) / Tile::kBlockK;
  const auto after = [&](uint32_t stage) {
    return stage + Tile::kStageBytes == ring + kRingBytes ? ring : stage + Tile::kStageBytes;
  };
  const FragmentReader<Tile> reader(warp);
  Fragments<Tile> fragments[2];
  uint32_t reading = ring;
  uint32_t writing = ring + (Tile::kStages - 1) * Tile::kStageBytes;
  cp_async_wait<Tile::kStages - 2>();
  cta_sync();
  reader.template read<kCount>(fragments[0], reading, 0);

#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    const int next = block + Tile::kStages - 1;
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      if (step < Tile::kLoadSteps) {  // into the stage that all warps finished before the last barrier
        if (next < blocks) load_block<Tile::kLoadSteps, Tile>(writing, loader_m, loader_n, next, k, step);
        if (step == Tile::kLoadSteps - 1) {
          cp_async_commit();
          writing = after(writing);
        }
      }
      if (step == Tile::kSteps - 1) {
        cp_async_wait<Tile::kStages - 2>();
        cta_sync();
        reading = after(reading);
      }
      // After the last block this reads values that are not used.
      reader.template read<kCount>(fragments[(step + 1) % 2], reading, (step + 1) % Tile::kSteps);
      multiply_step<Tile, kCount>(sums, fragments[step % 2]);
    }
    if constexpr (Tile::kSteps % 2 == 1) fragments[0] = fragments[1];
  }
  cp_async_wait<0>();
  cta_sync();
}

}  // namespace fused_mlp::sm80
