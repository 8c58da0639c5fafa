// The GEMM of few rows of a with quantised weights. Its time is that of reading the codes, which pass through shared
// memory once and are decoded on the way to the tensor cores.
//
// Weight rows are the M side of the products and rows of a (tokens) the N side, as in the streamed GEMM of sm80/. The
// sum over k does not depend on the order of k within an instruction, so each lane multiplies 16 adjacent codes of a
// block of 64 with the 16 matching elements of a. A block's products are summed over the codes only, and the sums are
// multiplied by the block's scale in float32: only codes are rounded, and those of FP8 and integers are not.
//
// Int4 in tiles has the layout of the tensor cores' operands: a lane's words are its own, rows of a are read by
// ldmatrix, and codes are decoded with their scales and zeros, rounded to the same bits as in torch's product.
//
// Warps share k, and so may the CTAs of a cluster. Their sums are added in the order of CTAs and warps.
#pragma once

#include <type_traits>

#include "../../overlap.cuh"
#include "../../sm80/ptx.cuh"
#include "../decode/bytes.cuh"
#include "../decode/pair_table.cuh"
#include "../problem.h"

namespace fused_mlp {

struct CodedGemmArgs {
  Matrix a;
  CodedWeight weight, up_weight;
  Matrix out;
  EpilogueArgs epilogue;
  int m, n, k;
  int tiles_m, tiles;
  int split;  // CTAs of a cluster, which share k
};

template <typename Element_, bool kGated_, CodedKernel kKernel_>
struct CodedGemm {
  using Element = Element_;
  static constexpr CodedKernel kKernel = kKernel_;
  static constexpr Coding kCoding = kKernel.coding;
  using OfFourBits = std::conditional_t<kCoding == Coding::kInt4, Int4Decoder<Element>, PairTable<Element>>;
  static constexpr bool kInTiles = kCoding == Coding::kInt4Tiles;  // tiles of 8 weight rows and 128 of k
  using OfHalfBytes = std::conditional_t<kInTiles, Int4TileDecoder<Element>, OfFourBits>;
  using Decoder = std::conditional_t<in_bytes(kCoding), ByteDecoder<kCoding, Element>, OfHalfBytes>;
  static constexpr Product kProduct = kGated_ ? Product::kGated : Product::kPlain;
  static constexpr bool kGated = kGated_;
  static constexpr int kTokens = kKernel.tokens, kTilesN = kTokens / 8;
  static constexpr int kWarpsM = kKernel.warps_m, kWarpsK = kKernel.warps_k;
  static constexpr int kTilesM = kKernel.tiles_m;  // tiles of 16 weight rows per warp
  static constexpr int kSteps = kKernel.steps;     // blocks of codes that a warp multiplies in a stage
  static constexpr int kStages = kKernel.stages;
  static constexpr int kThreads = kKernel.threads();

  static constexpr int kRows = kKernel.rows();  // weight rows of a tile
  static constexpr int kColumns = kKernel.columns(kGated);
  static constexpr int kBlocks = kKernel.blocks(), kBlockK = kKernel.block_k();

  static constexpr int kUnitBytes = block_bytes(kCoding), kLaneBytes = kUnitBytes / 4;
  static constexpr int kRowBytes = kBlocks * kUnitBytes;
  static constexpr int kTokenBytes = kBlockK * 2;
  static constexpr int kScalesOffset = kKernel.scales_offset(), kTokensOffset = kKernel.tokens_offset();
  static constexpr int kStageBytes = kKernel.stage_bytes();
  static constexpr int kSumStride = kKernel.sum_stride(), kPartFloats = kKernel.part_bytes() / 4;
  static_assert(Decoder::kBytes == kKernel.table_bytes());
  static_assert(!kInTiles || kSteps == 2, "a warp multiplies a tile in a stage");

  // Units of 32 or 64 bytes, one block of a row each, are permuted so that the rows read at the same time lie in
  // distinct banks.
  static constexpr int kOfLine = 128 / kUnitBytes;
  static constexpr int kUnits = kBlocks < kOfLine ? kBlocks : kOfLine, kRowsOfLine = kOfLine / kUnits;
  static __device__ __forceinline__ int swizzled(int row, int block) { return block ^ row / kRowsOfLine % kUnits; }
  // Vectors of rows of a are permuted for the same reason: products of tiles read eight rows at a time, others two.
  static __device__ __forceinline__ int token_piece(int row, int piece) { return piece ^ row % (kInTiles ? 8 : 2); }
};

__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(present ? 4 : 0)
               : "memory");
}

// The copies of a CTA, which run ahead of its products into the next tile.
template <typename Gemm>
struct CodedCopies {
  using Element = typename Gemm::Element;
  static constexpr int kThreads = Gemm::kThreads;
  static constexpr int kPieces = Gemm::kRowBytes / 16, kRowsOfPass = kThreads / kPieces;
  static constexpr int kPasses = Gemm::kRows / kRowsOfPass;
  static constexpr int kScaleWidth = Gemm::kInTiles ? 4 : 1;  // scales that are copied together
  static constexpr int kScales = Gemm::kRows * Gemm::kBlocks / kScaleWidth;
  static constexpr int kScalePasses = (kScales + kThreads - 1) / kThreads;
  static constexpr int kScaleRows = Gemm::kRows / kScaleWidth;
  static constexpr int kOfTiles = kPieces * 8;  // vectors in tiles of eight rows
  static constexpr int kTokenPieces = Gemm::kTokenBytes / 16;
  static constexpr int kTokenPasses = Gemm::kTokens * kTokenPieces / kThreads;
  static_assert(Gemm::kRows % kRowsOfPass == 0 && Gemm::kTokens * kTokenPieces % kThreads == 0);
  static_assert(kScales % kThreads == 0 || kScalePasses == 1);

  const CodedGemmArgs& args;
  const int begin, end, step;  // blocks of k in each tile; distance between tiles of this CTA
  int tile, block;
  const uint8_t* weights[kPasses];
  const float* scales[kScalePasses];
  const Element* tokens[kTokenPasses];  // null if there is no such token

  __device__ __forceinline__ CodedCopies(const CodedGemmArgs& args, int begin, int end, int tile, int step)
      : args(args), begin(begin), end(end), step(step), tile(tile), block(begin) {
    aim();
  }

  static __device__ __forceinline__ int first_column(const CodedGemmArgs& args, int tile) {
    return tile / args.tiles_m * Gemm::kColumns;
  }
  static __device__ __forceinline__ int first_token(const CodedGemmArgs& args, int tile) {
    return tile % args.tiles_m * Gemm::kTokens;
  }

  // Calls use(weight, row of the weight) for a row of a tile. Eight gate rows precede the up rows of the same columns,
  // so that one lane has both. Rows past the end read the last row.
  template <typename Use>
  __device__ __forceinline__ void with_row(int row, Use&& use) const {
    const bool up = Gemm::kGated && row / 8 % 2 == 1;
    const int column = first_column(args, tile) + (Gemm::kGated ? row / 16 * 8 + row % 8 : row);
    use(up ? args.up_weight : args.weight, static_cast<int64_t>(min(column, args.n - 1)));
  }

  __device__ __forceinline__ void aim() {
    const int thread = threadIdx.x;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      with_row(pass * kRowsOfPass + thread / kPieces, [&](const CodedWeight& weight, int64_t row) {
        if constexpr (Gemm::kInTiles) {
          weights[pass] = weight.data + (row / 8 * weight.columns * 4 + thread % kOfTiles * 16);
        } else {
          weights[pass] = weight.data + (row * (args.k / kCodedBlock) * Gemm::kUnitBytes + thread % kPieces * 16);
        }
      });
    }
#pragma unroll
    for (int pass = 0; pass < kScalePasses; ++pass) {
      const int index = pass * kThreads + thread;
      if constexpr (Gemm::kInTiles) {
        with_row(index % kScaleRows * kScaleWidth,
                 [&](const CodedWeight& weight, int64_t row) { scales[pass] = weight.scales + (row & -kScaleWidth); });
      } else {
        with_row(min(index / Gemm::kBlocks, Gemm::kRows - 1), [&](const CodedWeight& weight, int64_t row) {
          scales[pass] = weight.scales + row / weight.scale_rows * weight.scale_stride;
        });
      }
    }
#pragma unroll
    for (int pass = 0; pass < kTokenPasses; ++pass) {
      const int index = pass * kThreads + thread, token = first_token(args, tile) + index / kTokenPieces;
      const Element* const row = static_cast<const Element*>(args.a.data) + token * args.a.row_stride;
      tokens[pass] = token < args.m ? row + index % kTokenPieces * 8 : nullptr;
    }
  }

  __device__ __forceinline__ void load_weights(uint32_t stage) const {
    const int thread = threadIdx.x, first = block * Gemm::kBlockK;
    if constexpr (Gemm::kInTiles) {
      static_assert(kRowsOfPass % 8 == 0, "a pass has whole tiles");
      const bool present = first + thread % kOfTiles / 32 * 128 < args.weight.columns;
      const int64_t offset = present ? int64_t{first} * 4 : 0;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        sm80::cp_async_16(stage + (pass * kThreads + thread) * 16, weights[pass] + offset, present);
      }
    } else {
      constexpr int kOfUnit = Gemm::kUnitBytes / 16;
      const int row = thread / kPieces, piece = thread % kPieces;
      const uint32_t shared = stage + row * Gemm::kRowBytes + Gemm::swizzled(row, piece / kOfUnit) * Gemm::kUnitBytes +
                              piece % kOfUnit * 16;
      static_assert(kRowsOfPass % 4 == 0, "the swizzle is the same in each pass");
      const bool present = first + piece / kOfUnit * kCodedBlock < args.k;
      const int64_t offset = present ? static_cast<int64_t>(first) / kCodedBlock * Gemm::kUnitBytes : 0;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        sm80::cp_async_16(shared + pass * kRowsOfPass * Gemm::kRowBytes, weights[pass] + offset, present);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kScalePasses; ++pass) {
      const int index = pass * kThreads + thread;
      const int scale = Gemm::kInTiles ? index / kScaleRows : index % Gemm::kBlocks;
      if (kScales % kThreads != 0 && index >= kScales) continue;
      const bool present = first + scale * kCodedBlock < args.k;
      const int64_t of_row = present ? first / kCodedBlock + scale >> args.weight.scale_shift : 0;
      if constexpr (Gemm::kInTiles) {
        sm80::cp_async_16(stage + Gemm::kScalesOffset + index * 16, scales[pass] + of_row * args.weight.scale_stride,
                          present);
      } else {
        cp_async_4(stage + Gemm::kScalesOffset + (scale * Gemm::kRows + index / Gemm::kBlocks) * 4,
                   scales[pass] + of_row, present);
      }
    }
  }

  // The values in rows past the last token do not matter: their sums are not stored.
  __device__ __forceinline__ void load_tokens(uint32_t stage) const {
    const int first = block * Gemm::kBlockK;
#pragma unroll
    for (int pass = 0; pass < kTokenPasses; ++pass) {
      if (tokens[pass] == nullptr) continue;
      const int index = pass * kThreads + threadIdx.x, row = index / kTokenPieces, piece = index % kTokenPieces;
      const bool present = first + piece * 8 < args.k;
      sm80::cp_async_16(stage + Gemm::kTokensOffset + row * Gemm::kTokenBytes + Gemm::token_piece(row, piece) * 16,
                        tokens[pass] + (present ? first : 0), present);
    }
  }

  __device__ __forceinline__ void advance() {
    if (++block < end) return;
    block = begin;
    tile += step;
    if (tile < args.tiles) aim();
  }

  // If there is no next block, it commits an empty group, so that the number of groups after a block's is always the
  // same.
  __device__ __forceinline__ void start(uint32_t stage) {
    if (tile < args.tiles) {
      load_weights(stage);
      load_tokens(stage);
      advance();
    }
    sm80::cp_async_commit();
  }

  // Starts copying the weights of the first blocks, for all stages but one.
  __device__ __forceinline__ void fill_weights(uint32_t ring) {
#pragma unroll 1
    for (int stage = 0; stage < Gemm::kStages - 1 && tile < args.tiles; ++stage) {
      load_weights(ring + stage * Gemm::kStageBytes);
      advance();
    }
  }

  // Starts copying the matching rows of a.
  __device__ __forceinline__ void fill_tokens(uint32_t ring) {
#pragma unroll 1
    for (int stage = 0; stage < Gemm::kStages - 1; ++stage) {
      if (tile < args.tiles) {
        load_tokens(ring + stage * Gemm::kStageBytes);
        advance();
      }
      sm80::cp_async_commit();
    }
  }
};

// The position of a thread in the products. `row` is its weight row, and its row of a, modulo eight.
template <typename Gemm>
struct CodedLane {
  const int warp_m, warp_k, row, quarter;
  __device__ __forceinline__ CodedLane()
      : warp_m(threadIdx.x / 32 % Gemm::kWarpsM),
        warp_k(threadIdx.x / 32 / Gemm::kWarpsM),
        row(threadIdx.x % 32 / 4),
        quarter(threadIdx.x % 4) {}

  // A row of the CTA's tile, in tile `i` of the warp: the lane's row, or the one 8 below it.
  __device__ __forceinline__ int tile_row(int i, int half) const {
    return (warp_m * Gemm::kTilesM + i) * 16 + half * 8 + row;
  }
};

template <typename Gemm>
using CodedSums = float[Gemm::kTilesM][Gemm::kTilesN][4];

// A stage of the ring, from which a lane reads a block of 64 elements of k.
template <typename Gemm>
struct CodedStage {
  const uint8_t* const stage;
  const CodedLane<Gemm>& lane;
  const int block;

  // The lane's 16 codes.
  __device__ __forceinline__ const uint8_t* codes(int i, int half) const {
    const uint8_t* const row = stage + lane.tile_row(i, half) * Gemm::kRowBytes;
    return row + Gemm::swizzled(lane.row, block) * Gemm::kUnitBytes + lane.quarter * Gemm::kLaneBytes;
  }
  __device__ __forceinline__ float scale(int i, int half) const {
    return reinterpret_cast<const float*>(stage + Gemm::kScalesOffset)[block * Gemm::kRows + lane.tile_row(i, half)];
  }
  // Half of the 16 elements of a that match the lane's codes.
  __device__ __forceinline__ uint4 tokens(int n, int half) const {
    const uint8_t* const row = stage + Gemm::kTokensOffset + (n * 8 + lane.row) * Gemm::kTokenBytes;
    const int piece = Gemm::token_piece(lane.row, 2 * lane.quarter + half);
    return *reinterpret_cast<const uint4*>(row + block * kCodedBlock * 2 + piece * 16);
  }
};

// sums += scale * (codes a^T) of one block.
template <typename Gemm, typename Stage>
__device__ __forceinline__ void multiply_block(CodedSums<Gemm>& sums, const Stage& stage, const uint8_t* table) {
  using Element = typename Gemm::Element;
  uint32_t codes[Gemm::kTilesM][4][4];
  float scales[Gemm::kTilesM][2];
#pragma unroll
  for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pairs[8];
      if constexpr (Gemm::kCoding == Coding::kInt4) {
        scales[i][half] = stage.scale(i, half);
        Gemm::Decoder::decode_16(pairs, stage.codes(i, half), take_zero(scales[i][half]));
      } else {
        Gemm::Decoder::decode_16(pairs, table, stage.codes(i, half));
        scales[i][half] = stage.scale(i, half);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        codes[i][j][half] = pairs[2 * j];
        codes[i][j][half + 2] = pairs[2 * j + 1];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < Gemm::kTilesN; ++n) {
    const uint4 first = stage.tokens(n, 0), second = stage.tokens(n, 1);
    const uint32_t pairs[4][2] = {{first.x, first.y}, {first.z, first.w}, {second.x, second.y}, {second.z, second.w}};
    float of_block[Gemm::kTilesM][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < Gemm::kTilesM; ++i) sm80::Mma<Element>::multiply(of_block[i], codes[i][j], pairs[j]);
    }
#pragma unroll
    for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][n][c] = fmaf(of_block[i][c], scales[i][c / 2], sums[i][n][c]);
    }
  }
}

// sums += codes a^T of the warp's tiles, whose words are operands of the tensor cores without rearrangement.
template <typename Gemm>
__device__ __forceinline__ void multiply_tiles(CodedSums<Gemm>& sums, const uint8_t* stage,
                                               const CodedLane<Gemm>& lane) {
  using Line = typename Gemm::Decoder::Line;
  const int number = threadIdx.x % 32;
  const auto codes_of = [&](int i, int half) {
    const uint8_t* const tiles = stage + (lane.tile_row(i, half) & ~7) * Gemm::kRowBytes;
    return *reinterpret_cast<const uint4*>(tiles + (lane.warp_k * 32 + number) * 16);
  };
  const uint32_t tokens = sm80::shared_address(stage + Gemm::kTokensOffset) + number % 8 * Gemm::kTokenBytes;
  uint4 codes[Gemm::kTilesM][2];
#pragma unroll
  for (int i = 0; i < Gemm::kTilesM; ++i) {
    codes[i][0] = codes_of(i, 0);
    codes[i][1] = codes_of(i, 1);
  }
#pragma unroll
  for (int step = 0; step < Gemm::kSteps; ++step) {
    const int block = lane.warp_k * Gemm::kSteps + step;
    const CodedStage<Gemm> of_block{stage, lane, block};
    Line lines[Gemm::kTilesM][2];
#pragma unroll
    for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lines[i][half] = Gemm::Decoder::line(__float_as_uint(of_block.scale(i, half)));
      }
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t pairs[Gemm::kTilesM][2][4];
#pragma unroll
      for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4& words = codes[i][half];
          const uint32_t bits = step == 0 ? (word == 0 ? words.x : words.y) : (word == 0 ? words.z : words.w);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            pairs[i][j / 2][j % 2 * 2 + half] = Gemm::Decoder::decode(bits, j, lines[i][half]);
          }
        }
      }
      const int piece = Gemm::token_piece(number % 8, block * 8 + word * 4 + number / 8);
#pragma unroll
      for (int n = 0; n < Gemm::kTilesN; ++n) {
        uint32_t of_tokens[2][2];
        sm80::load_matrix_x4(tokens + n * 8 * Gemm::kTokenBytes + piece * 16, of_tokens[0][0], of_tokens[0][1],
                             of_tokens[1][0], of_tokens[1][1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 0; i < Gemm::kTilesM; ++i)
            sm80::Mma<typename Gemm::Element>::multiply(sums[i][n], pairs[i][j], of_tokens[j]);
        }
      }
    }
  }
}

// The sums of CTAs and warps, in shared memory, each [token, row].
template <typename Gemm>
struct CodedParts {
  float* const own;
  const int split;

  __device__ __forceinline__ void put(const CodedSums<Gemm>& sums, const CodedLane<Gemm>& lane) const {
    float* const part = own + lane.warp_k * Gemm::kPartFloats;
#pragma unroll
    for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
      for (int n = 0; n < Gemm::kTilesN; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int token = n * 8 + lane.quarter * 2 + c % 2;
          part[token * Gemm::kSumStride + lane.tile_row(i, c / 2)] = sums[i][n][c];
        }
      }
    }
  }

  __device__ __forceinline__ float sum(int token, int row) const {
    const float* const place = own + token * Gemm::kSumStride + row;
    float sum = 0.0f;
    for (int rank = 0; rank < split; ++rank) {
#pragma unroll
      for (int warp = 0; warp < Gemm::kWarpsK; ++warp) sum += load(place + warp * Gemm::kPartFloats, rank);
    }
    return sum;
  }

  // Waits until all CTAs have stored their sums, or have read them.
  __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
    if (split > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }

 private:
  __device__ __forceinline__ float load(const float* place, int rank) const {
#if __CUDA_ARCH__ >= 900
    if (split > 1) {
      float value;
      asm volatile("{.reg .b32 mapped;\nmapa.shared::cluster.u32 mapped, %1, %2;\nld.shared::cluster.f32 %0, [mapped];}"
                   : "=f"(value)
                   : "r"(sm80::shared_address(place)), "r"(rank)
                   : "memory");
      return value;
    }
#endif
    return *place;
  }
};

// Each of kThreads threads finishes some elements.
template <typename Gemm>
__device__ __forceinline__ void store_tile(const CodedGemmArgs& args, const CodedParts<Gemm>& parts, float unscale,
                                           int rank, int first_token, int first_column) {
  using Element = typename Gemm::Element;
  const EpilogueArgs& epilogue = args.epilogue;
  const CodedActivation<Element> activate{epilogue.activation};
  const int items = Gemm::kColumns * min(Gemm::kTokens, args.m - first_token);
  for (int item = rank * Gemm::kThreads + threadIdx.x; item < items; item += parts.split * Gemm::kThreads) {
    const int local = item % Gemm::kColumns, token = item / Gemm::kColumns, column = first_column + local;
    if (column >= args.n) continue;
    float value[1];
    GluEpilogue<Gemm::kProduct>::apply(value, activate, [&](Operand operand, auto&& take) {
      const bool up = operand == Operand::kUp;
      const void* const data = up ? epilogue.up_bias : epilogue.bias;
      const float bias = data == nullptr ? 0.0f : to_float(static_cast<const Element*>(data)[column]);
      const int row = Gemm::kGated ? local / 8 * 16 + local % 8 + up * 8 : local;
      take(0, fmaf(parts.sum(token, row), unscale, bias));
    });
    const int64_t to = first_token + token;
    static_cast<Element*>(args.out.data)[to * args.out.row_stride + column] = from_float<Element>(value[0]);
  }
}

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kKernel.ctas)
    coded_gemm_kernel(const __grid_constant__ CodedGemmArgs args) {
#if __CUDA_ARCH__ != 900
  if (Gemm::kInTiles) return;  // nothing was measured elsewhere, and choice.cpp does not use it there
#endif
  extern __shared__ __align__(128) uint8_t raw_shared[];
  uint8_t* const ring = raw_shared + Gemm::Decoder::kBytes;
  const int clusters = gridDim.x / args.split, cluster = blockIdx.x / args.split, rank = blockIdx.x % args.split;
  const int blocks = (args.k + Gemm::kBlockK - 1) / Gemm::kBlockK;
  const int begin = rank * blocks / args.split, end = (rank + 1) * blocks / args.split;
  const CodedLane<Gemm> lane;
  const CodedParts<Gemm> parts{reinterpret_cast<float*>(ring + Gemm::kKernel.ring_bytes()), args.split};

  allow_next_kernel();
  CodedCopies<Gemm> copies(args, begin, end, cluster, clusters);
  CodedCopies<Gemm> ahead = copies;
  ahead.fill_weights(sm80::shared_address(ring));
  const float unscale = Gemm::Decoder::template fill<Gemm::kThreads>(raw_shared, args.weight);
  wait_for_previous_kernel();
  copies.fill_tokens(sm80::shared_address(ring));
  const uint8_t* const table = raw_shared + threadIdx.x % 32 * 4;
  int reading = 0, writing = Gemm::kStages - 1;
  const auto after = [](int stage) { return stage + 1 == Gemm::kStages ? 0 : stage + 1; };
#pragma unroll 1
  for (int tile = cluster; tile < args.tiles; tile += clusters) {
    CodedSums<Gemm> sums = {};
#pragma unroll 1
    for (int block = begin; block < end; ++block) {
      sm80::cp_async_wait<Gemm::kStages - 2>();
      __syncthreads();  // the block has arrived, and all warps are done with the one before it
      copies.start(sm80::shared_address(ring) + writing * Gemm::kStageBytes);
      writing = after(writing);
      const uint8_t* const stage = ring + reading * Gemm::kStageBytes;
      if constexpr (Gemm::kInTiles) {
        multiply_tiles<Gemm>(sums, stage, lane);
      } else {
#pragma unroll
        for (int step = 0; step < Gemm::kSteps; ++step) {
          multiply_block<Gemm>(sums, CodedStage<Gemm>{stage, lane, lane.warp_k * Gemm::kSteps + step}, table);
        }
      }
      reading = after(reading);
    }
    parts.put(sums, lane);
    parts.sync();
    store_tile<Gemm>(args, parts, unscale, rank, CodedCopies<Gemm>::first_token(args, tile),
                     CodedCopies<Gemm>::first_column(args, tile));
    // This CTA's next sums are written after another barrier; those of other CTAs are not.
    if (args.split > 1) parts.sync();
  }
  sm80::cp_async_wait<0>();
}

}  // namespace fused_mlp
