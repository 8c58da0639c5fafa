// The GEMM of few rows of a with quantised weights. Its time is that of reading the codes, which go from memory to
// registers and are decoded there, on their way to the tensor cores.
//
// Weight rows are the M side of the products and rows of a (tokens) the N side, as in the streamed GEMM of sm80/. The
// sum over k does not depend on which element of k is which in an instruction, so each lane multiplies 16 adjacent
// codes of a block of 64 with the 16 elements of a that they belong to. A block's products are added up of the codes
// alone, and are multiplied by the block's scale in float32: only codes are rounded, and those of FP8 and integers are
// not.
//
// A warp has weight rows of its own and asks for their codes some blocks ahead, without waiting for other warps: these
// share rows of a, which lie in shared memory. Warps may share k too, and so may the CTAs of a cluster. Their sums are
// added in the order of CTAs and warps.
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
  CodedShape shape;
};

template <typename Element_, bool kGated_, CodedKernel kKernel_>
struct CodedGemm {
  using Element = Element_;
  static constexpr CodedKernel kKernel = kKernel_;
  static constexpr Coding kCoding = kKernel.coding;
  using OfFourBits = std::conditional_t<kCoding == Coding::kInt4, Int4Decoder<Element>, PairTable<Element>>;
  using Decoder = std::conditional_t<in_bytes(kCoding), ByteDecoder<kCoding, Element>, OfFourBits>;
  static constexpr Product kProduct = kGated_ ? Product::kGated : Product::kPlain;
  static constexpr bool kGated = kGated_;
  static constexpr int kTokens = kKernel.tokens, kTilesN = kTokens / 8;
  static constexpr int kTilesM = kKernel.tiles_m;  // of 16 weight rows, of a warp
  static constexpr int kAhead = kKernel.ahead;     // runs of blocks that are on their way
  static constexpr int kThreads = kKernel.warps * 32;
  static constexpr int kStages = kTokens > 16 ? 3 : 4;  // of rows of a

  static constexpr int kUnitBytes = block_bytes(kCoding), kLaneWords = kUnitBytes / 16;
  static_assert(Decoder::kBytes == kKernel.table_bytes());
};

// The codes of a warp's rows: some runs of blocks of k, each lane's in its registers.
template <typename Gemm>
struct CodedStream {
  static constexpr int kWords = Gemm::kLaneWords, kTilesM = Gemm::kTilesM;
  using Codes = uint32_t[kCodedRun][kTilesM][2][kWords];
  using Scales = float[kTilesM][2];

  const CodedGemmArgs& args;
  const int begin, end, step, of_tile;  // runs of this CTA; tiles between those of this CTA; runs of a tile's warp
  const int quarter;
  int tile, run, left;
  int64_t codes[kTilesM][2];
  int scales[kTilesM][2];

  __device__ __forceinline__ CodedStream(const CodedGemmArgs& args, int begin, int end, int tile, int step, int of_tile)
      : args(args), begin(begin), end(end), step(step), of_tile(of_tile), quarter(threadIdx.x % 4), tile(tile) {
    aim();
  }

  __device__ __forceinline__ static int warp_m(const CodedGemmArgs& args) {
    return threadIdx.x / 32 % args.shape.warps_m;
  }
  __device__ __forceinline__ static int warp_k(const CodedGemmArgs& args) {
    return threadIdx.x / 32 / args.shape.warps_m;
  }

  // The rows of a tile of this warp. Eight gate rows come before the up rows of the same columns: so one lane has
  // both. The last row stands for those past the end.
  __device__ __forceinline__ void aim() {
    run = begin + warp_k(args);
    left = of_tile;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool up = Gemm::kGated && half == 1;
        const int group = (tile / args.tiles_m * args.shape.warps_m + warp_m(args)) * kTilesM + i;
        const int column = (Gemm::kGated ? group * 8 : group * 16 + half * 8) + threadIdx.x % 32 / 4;
        const CodedWeight& weight = up ? args.up_weight : args.weight;
        const int64_t row = min(column, args.n - 1);
        codes[i][half] = reinterpret_cast<int64_t>(weight.data) + row * (args.k / kCodedBlock) * Gemm::kUnitBytes +
                         quarter * (kWords * 4) + int64_t{run} * (kCodedRun * Gemm::kUnitBytes);
        scales[i][half] = static_cast<int>(row / weight.scale_rows * weight.scale_stride);
      }
    }
  }

  __device__ __forceinline__ bool present(int block) const {
    return tile < args.tiles && run < end && run * kCodedRun + block < args.k / kCodedBlock;
  }

  __device__ __forceinline__ static void load(uint32_t (&words)[kWords], int64_t address) {
    if constexpr (kWords == 2) {
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1])
                   : "l"(address));
    } else {
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(address));
    }
  }

  __device__ __forceinline__ void load_codes(Codes& to, int block) const {
    if (!present(block)) return;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) load(to[block][i][half], codes[i][half] + block * Gemm::kUnitBytes);
    }
  }

  // A lane has the scale of one block of the run.
  __device__ __forceinline__ void load_scales(Scales& to) const {
    if (!present(quarter)) return;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const of_weight = Gemm::kGated && half == 1 ? args.up_weight.scales : args.weight.scales;
        to[i][half] = __ldg(of_weight + (scales[i][half] + (run * kCodedRun + quarter >> args.weight.scale_shift)));
      }
    }
  }

  __device__ __forceinline__ void advance() {
    run += args.shape.warps_k;
    if (--left == 0) {
      tile += step;
      if (tile < args.tiles) aim();
      return;
    }
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[i][half] += int64_t{args.shape.warps_k} * (kCodedRun * Gemm::kUnitBytes);
      }
    }
  }
};

template <typename Gemm>
using CodedSums = float[Gemm::kTilesM][Gemm::kTilesN][4];

// Rows of a in a ring of stages of shared memory, each so many rows of shape.row_bytes().
template <typename Gemm>
struct CodedTokens {
  using Element = typename Gemm::Element;
  const CodedGemmArgs& args;
  const uint32_t ring;
  const int begin, stages;  // the first run of k; stages of this CTA's k

  // Asks for stage `index` of a tile's rows. Those past the last token are not read, here and in the products.
  __device__ __forceinline__ void start(int index, int slot, int first_token) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_bytes = args.shape.row_bytes();
    const int first = begin * kCodedRun * kCodedBlock + index * (row_bytes / 2);
    const int pieces = min(row_bytes / 16, (args.k - first) / 8), tokens = min(Gemm::kTokens, args.m - first_token);
    for (int token = warp; token < tokens; token += blockDim.x / 32) {
      const Element* const row =
          static_cast<const Element*>(args.a.data) + (first_token + token) * args.a.row_stride + first;
      const uint32_t to = ring + (slot * Gemm::kTokens + token) * row_bytes;
      for (int piece = lane; piece < pieces; piece += 32) {
        sm80::cp_async_16(to + (piece ^ token % 2) * 16, row + piece * 8, true);
      }
    }
  }
};

// The sums of CTAs and warps, in shared memory, each [token, row].
template <typename Gemm>
struct CodedParts {
  float* const own;
  const CodedShape& shape;

  __device__ __forceinline__ int rows() const { return shape.warps_m * Gemm::kTilesM * 16; }
  __device__ __forceinline__ int stride() const { return rows() + 4; }  // no two lanes meet a bank when they write

  __device__ __forceinline__ void put(const CodedSums<Gemm>& sums, int warp_m, int warp_k, int tokens) const {
    const int lane = threadIdx.x % 32;
    float* const part = own + warp_k * Gemm::kTokens * stride() + warp_m * Gemm::kTilesM * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < Gemm::kTilesN; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int token = n * 8 + lane % 4 * 2 + c % 2;
        if (token >= tokens) continue;
#pragma unroll
        for (int i = 0; i < Gemm::kTilesM; ++i) part[token * stride() + i * 16 + c / 2 * 8] = sums[i][n][c];
      }
    }
  }

  __device__ __forceinline__ float sum(int token, int row) const {
    const float* const place = own + token * stride() + row;
    float sum = 0.0f;
    for (int rank = 0; rank < shape.split; ++rank) {
      for (int warp = 0; warp < shape.warps_k; ++warp) sum += load(place + warp * Gemm::kTokens * stride(), rank);
    }
    return sum;
  }

  // All CTAs have put their sums, or have read them.
  __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
    if (shape.split > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }

 private:
  __device__ __forceinline__ float load(const float* place, int rank) const {
#if __CUDA_ARCH__ >= 900
    if (shape.split > 1) {
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

// sums += scale * (codes a^T) of one block. `tokens` is the place of the lane's first 8 elements of its row of a, and
// the other 8 lie at that xor 16.
template <typename Gemm>
__device__ __forceinline__ void multiply_block(CodedSums<Gemm>& sums,
                                               const uint32_t (&words)[Gemm::kTilesM][2][Gemm::kLaneWords],
                                               const float (&lane_scales)[Gemm::kTilesM][2], int block,
                                               uint32_t tokens, int rows, int row_bytes, const uint8_t* table,
                                               uint32_t of_lane) {
  using Element = typename Gemm::Element;
  uint32_t codes[Gemm::kTilesM][4][4];
  float scales[Gemm::kTilesM][2];
#pragma unroll
  for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scales[i][half] = __shfl_sync(~0u, lane_scales[i][half], block, 4);
      uint32_t pairs[8];
      if constexpr (Gemm::kCoding == Coding::kInt4) {
        Gemm::Decoder::decode_16(pairs, words[i][half], take_zero(scales[i][half]));
      } else {
        Gemm::Decoder::decode_16(pairs, table, of_lane, words[i][half]);
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
    uint4 first{}, second{};
    if (n * 8 < rows) {
      const uint32_t place = tokens + n * 8 * row_bytes;
      first = sm80::load_shared_uint4(place);
      second = sm80::load_shared_uint4(place ^ 16);
    }
    const uint32_t pairs[4][2] = {{first.x, first.y}, {first.z, first.w}, {second.x, second.y}, {second.z, second.w}};
    float of_block[Gemm::kTilesM][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < Gemm::kTilesM; ++i) {
        if (j == 0) {
          sm80::Mma<Element>::set(of_block[i], codes[i][j], pairs[j]);
        } else {
          sm80::Mma<Element>::multiply(of_block[i], codes[i][j], pairs[j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Gemm::kTilesM; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][n][c] = fmaf(of_block[i][c], scales[i][c / 2], sums[i][n][c]);
    }
  }
}

// Each thread finishes some elements.
template <typename Gemm>
__device__ __forceinline__ void store_tile(const CodedGemmArgs& args, const CodedParts<Gemm>& parts, float unscale,
                                           int rank, int first_token, int first_column) {
  using Element = typename Gemm::Element;
  const EpilogueArgs& epilogue = args.epilogue;
  const CodedActivation<Element> activate{epilogue.activation};
  const int columns = Gemm::kGated ? parts.rows() / 2 : parts.rows(), threads = blockDim.x;
  const int items = columns * min(Gemm::kTokens, args.m - first_token);
  for (int item = rank * threads + threadIdx.x; item < items; item += args.shape.split * threads) {
    const int local = item % columns, token = item / columns, column = first_column + local;
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
__global__ void __launch_bounds__(Gemm::kThreads)
    coded_gemm_kernel(const __grid_constant__ CodedGemmArgs args) {
  extern __shared__ __align__(128) uint8_t raw_shared[];
  using Stream = CodedStream<Gemm>;
  const CodedShape& shape = args.shape;
  const int clusters = gridDim.x / shape.split, cluster = blockIdx.x / shape.split, rank = blockIdx.x % shape.split;
  const int runs = (args.k / kCodedBlock + kCodedRun - 1) / kCodedRun;
  const int begin = rank * runs / shape.split, end = (rank + 1) * runs / shape.split;
  const int of_stage = shape.steps * shape.warps_k, stages = (end - begin + of_stage - 1) / of_stage;
  const bool stays = stages <= Gemm::kStages && args.tiles_m == 1;
  const int warp_m = Stream::warp_m(args), warp_k = Stream::warp_k(args);
  const int row_bytes = shape.row_bytes(), row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
  const uint32_t ring = sm80::shared_address(raw_shared) + Gemm::Decoder::kBytes;
  const int stage_bytes = Gemm::kTokens * row_bytes;
  const CodedParts<Gemm> parts{
      reinterpret_cast<float*>(raw_shared + Gemm::Decoder::kBytes + Gemm::kStages * stage_bytes), shape};
  const CodedTokens<Gemm> tokens{args, ring, begin, stages};

  allow_next_kernel();
  Stream stream(args, begin, end, cluster, clusters, stages * shape.steps);
  typename Stream::Codes codes[Gemm::kAhead];
  typename Stream::Scales scales[Gemm::kAhead + 1] = {};
#pragma unroll
  for (int i = 0; i < Gemm::kAhead; ++i) {
    stream.load_scales(scales[i]);
#pragma unroll
    for (int block = 0; block < kCodedRun; ++block) stream.load_codes(codes[i], block);
    stream.advance();
  }
  const float unscale = Gemm::Decoder::fill(raw_shared, args.weight);
  wait_for_previous_kernel();
  const auto first_token = [&](int tile) { return tile % args.tiles_m * Gemm::kTokens; };
  // Asks for a stage of a tile, or of one behind it where rows of a do not stay.
  const auto start = [&](int index, int slot, int tile) {
    if (!stays) {
      tile += index / stages * clusters;
      index %= stages;
    }
    if (index < stages && tile < args.tiles) tokens.start(index, slot, first_token(tile));
    sm80::cp_async_commit();
  };
#pragma unroll 1
  for (int index = 0; index < Gemm::kStages - 1; ++index) start(index, index, cluster);
  int slot = 0;
#pragma unroll 1
  for (int tile = cluster; tile < args.tiles; tile += clusters) {
    CodedSums<Gemm> sums = {};
    const bool again = stays && tile != cluster;
    const int present = args.m - first_token(tile) - row;  // rows of a from the lane's first one on
#pragma unroll 1
    for (int index = 0; index < stages; ++index) {
      if (!again) {
        sm80::cp_async_wait<Gemm::kStages - 2>();
        __syncthreads();  // the stage is there, and all warps are done with the one before it
        start(index + Gemm::kStages - 1, (slot + Gemm::kStages - 1) % Gemm::kStages, tile);
      }
      uint32_t place = ring + slot * stage_bytes + row * row_bytes + warp_k * (kCodedRun * kCodedBlock * 2) +
                       (2 * quarter ^ row % 2) * 16;
#pragma unroll 1
      for (int first = 0; first < shape.steps; first += Gemm::kAhead) {
#pragma unroll
        for (int i = 0; i < Gemm::kAhead; ++i) {
          const int run = begin + (index * shape.steps + first + i) * shape.warps_k + warp_k;
          stream.load_scales(scales[Gemm::kAhead]);
#pragma unroll
          for (int block = 0; block < kCodedRun; ++block) {
            if (run < end && run * kCodedRun + block < args.k / kCodedBlock) {
              multiply_block<Gemm>(sums, codes[i][block], scales[i], block, place + block * (kCodedBlock * 2), present,
                                   row_bytes, raw_shared, threadIdx.x % 32 * 4);
            }
            stream.load_codes(codes[i], block);
          }
#pragma unroll
          for (int m = 0; m < Gemm::kTilesM; ++m) {
            scales[i][m][0] = scales[Gemm::kAhead][m][0];
            scales[i][m][1] = scales[Gemm::kAhead][m][1];
          }
          stream.advance();
          place += shape.warps_k * (kCodedRun * kCodedBlock * 2);
        }
      }
      slot = (slot + 1) % Gemm::kStages;
    }
    if (stays) slot = 0;
    // next tile
    parts.put(sums, warp_m, warp_k, min(Gemm::kTokens, args.m - first_token(tile)));
    parts.sync();
    store_tile<Gemm>(args, parts, unscale, rank, first_token(tile),
                     tile / args.tiles_m * shape.warps_m * Gemm::kKernel.columns(Gemm::kGated));
    if (tile + clusters < args.tiles || shape.split > 1) parts.sync();
  }
  sm80::cp_async_wait<0>();
}

}  // namespace fused_mlp
