// The main loop of every GEMM of sm_80: a ring of shared memory stages, filled by cp.async of all threads some blocks
// of k ahead, from which the warps take fragments by ldmatrix and multiply them by mma.sync, one step ahead as well.
//
// Rows of a stage lie behind each other, block_k elements each. Their pieces of 16 bytes are swizzled, so that eight
// rows of one column of pieces, which is what ldmatrix reads at a time, lie in distinct banks. Sides may also be read
// as they lie, [k, n] or [k, m]: then a stage has a row for each of block_k, and ldmatrix transposes.
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

// The place of piece `piece` of row `row`, in rows of kRowBytes. The swizzle repeats every eight rows.
template <int kRowBytes>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  constexpr int kPieces = kRowBytes / kPieceBytes < 8 ? kRowBytes / kPieceBytes : 8;  // that change places
  constexpr int kRowsOfLine = 8 / kPieces;  // rows of a line of 128 bytes, once in all banks
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

// The same, whose warps have rows of the M side in turns, a tile each: so that they share out rows that fill a part of
// it.
template <typename Tile>
struct InTurns : Tile {
  static constexpr int kWarpStepM = kMmaM;
  static constexpr int kTileStepM = kMmaM * Tile::kWarpsM;
};

template <typename Tile>
using Accumulator = float[Tile::kTilesM][Tile::kTilesN][4];

// This thread's part of the copies of one side: pieces of the same column of pieces, from rows that are a pass apart.
// With kSkips, rows past those that there are become zeros, and are not read.
template <typename Tile, int kRows, bool kSkips = false>
struct SideLoader {
  using Element = typename Tile::Element;
  static constexpr int kPieces = Tile::kBlockK / kPiece;  // pieces of a row
  static constexpr int kRowsOfPass = Tile::kThreads / kPieces;
  static constexpr int kPasses = (kRows + kRowsOfPass - 1) / kRowsOfPass;
  static_assert(kRowsOfPass % 8 == 0, "the swizzle is the same in each pass");

  const Element* source[kPasses];
  int rows;  // that there are

  __device__ __forceinline__ static int row() { return threadIdx.x / kPieces; }
  __device__ __forceinline__ static int piece() { return threadIdx.x % kPieces; }

  // row_of(i) is where the elements of row i begin: some row of the matrix also for a row past its end.
  template <typename RowOf>
  __device__ __forceinline__ explicit SideLoader(RowOf&& row_of, int rows = kRows) : rows(rows) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int tile_row = pass * kRowsOfPass + row();
      source[pass] = row_of(tile_row < kRows ? tile_row : kRows - 1) + piece() * kPiece;
      if constexpr (Tile::kLies) keep(source[pass]);
    }
  }

  // Copies every kOf-th pass, from pass `first` on, of the block that begins at element `begin` of k.
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

// The same of a side that lies as [k, n], or [k, m]: its rows are elements of k. It is asked for one block after the
// other, and in each for the first passes first.
template <typename Tile, int kColumns = Tile::kRowsN>
struct LyingLoader {
  using Element = typename Tile::Element;
  static constexpr int kPieces = kColumns / kPiece;  // pieces of a row
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kRowsOfPass = Tile::kThreads / kPieces;
  static constexpr int kPasses = Tile::kBlockK / kRowsOfPass;
  static_assert(kRowsOfPass % 8 == 0 && Tile::kBlockK % kRowsOfPass == 0);

  const Element* source;  // where this thread's next copy reads
  int64_t step;           // to the one behind it

  __device__ __forceinline__ static int row() { return threadIdx.x / kPieces; }
  __device__ __forceinline__ static int piece() { return threadIdx.x % kPieces; }

  // `column` is where this thread's pieces lie.
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

// The place of a warp in its CTA.
template <typename Tile>
struct WarpPlace {
  int m, n, k;
  __device__ __forceinline__ explicit WarpPlace(int warp)
      : m(warp % Tile::kWarpsM), n(warp / Tile::kWarpsM % Tile::kWarpsN), k(warp / (Tile::kWarpsM * Tile::kWarpsN)) {}
};

// The places of this lane's rows in a stage, for ldmatrix.
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

  // A step is two pieces. It changes bits of the offset within a row, which the swizzle changes by XOR as well.
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

  // Columns are bits of the offset within a row, which the swizzle changes by XOR as well.
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
      const int j = i % 2 == 0 ? each : Tile::kTilesN - 1 - each;  // back and forth: each turn uses a fragment twice
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

// Copies every kOf-th pass of a block, from pass `first` on, into a stage.
template <int kOf, typename Tile, typename LoaderM, typename LoaderN>
__device__ __forceinline__ void load_block(uint32_t stage, LoaderM& loader_m, LoaderN& loader_n, int block, int k,
                                           int first) {
  loader_m.template load<kOf>(stage, block * Tile::kBlockK, k, first);
  loader_n.template load<kOf>(stage + Tile::kRowsM * Tile::kRowBytes, block * Tile::kBlockK, k, first);
}

// Fills all stages but the last, in which nothing is copied before multiply(). What the thread copied before arrives
// with the first block. Every block is a group of copies, and there is a group for every stage also where there is no
// block for it: so that the number of groups behind a block's is always the same.
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

// sums += M N^T over k elements, of the rows that the loaders bring, with which the ring was filled; of each warp's
// rows of M the first kCount tiles. On return the ring is free, and no copy is on its way.
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
      if (step < Tile::kLoadSteps) {  // into the stage that all warps are done with since the last barrier
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
      // Past the last block this reads what nobody uses.
      reader.template read<kCount>(fragments[(step + 1) % 2], reading, (step + 1) % Tile::kSteps);
      multiply_step<Tile, kCount>(sums, fragments[step % 2]);
    }
    if constexpr (Tile::kSteps % 2 == 1) fragments[0] = fragments[1];
  }
  cp_async_wait<0>();
  cta_sync();
}

}  // namespace fused_mlp::sm80
