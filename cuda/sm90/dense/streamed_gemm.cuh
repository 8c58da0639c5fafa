// The GEMM for few rows of a. Its time is that of reading the weights, so they stream through shared memory once for
// each tile of rows, and the operands swap places: weight rows are the M side of the wgmma, and the rows of a (tokens)
// are its N side. A tile has as many columns as share the weights out evenly over the multiprocessors, up to 64 for a
// wgmma; what a wgmma multiplies beyond them is whatever lies there, and is not stored. A cluster may split k, and adds
// its CTAs' sums in the order of their ranks through distributed shared memory.
#pragma once

#include "../../gemm/epilogue.cuh"
#include "../../overlap.cuh"
#include "../chip.h"
#include "../low_rank/low_rank.h"
#include "../ptx.cuh"
#include "../ring.cuh"
#include "../wgmma.cuh"

namespace fused_mlp::sm90 {

struct StreamedGemmArgs {
  CUtensorMap a;
  CUtensorMap weight;
  CUtensorMap up_weight;
  EpilogueArgs epilogue;
  void* out;
  int64_t out_stride;
  int m;
  int n;
  int k_blocks;         // of all operands
  int own_blocks;       // of a and the weights, without those of low_rank
  int blocks_together;  // that are asked for one right after the other
  int tiles_m;
  int tokens;         // in a tile
  int columns;        // likewise
  int stages;         // stages of the ring
  bool starts_early;  // before the kernel that writes a is done
  bool reads_once;    // weights that the L2 cache cannot keep for another tile, or another call
  LowRankArgs low_rank;
};

// The constants of a kernel, of which a multiprocessor holds kCtas at once.
template <typename Element_, Product kProduct_, int kTokens_, int kCtas, int kGroups_ = 1>
struct StreamedShape {
  using Element = Element_;
  static constexpr Product kProduct = kProduct_;
  static constexpr bool kGated = kProduct == Product::kGated;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kTransposed = false;  // true if weights are [k, n]: M-major operands
  static constexpr int kGroups = kGroups_;    // wgmmas of 64 rows of one weight, which are columns of the output
  static constexpr int kRows = kGroups * kStreamedColumns;
  static constexpr bool kSaysReadsOnce = false;  // true if the L2 cache is told if weights are read once
  static constexpr bool kTakesLowRank = false;   // true if a product of few columns may be added
  static constexpr bool kStoresAlone = false;    // true if a CTA that is a cluster by itself stores from registers
  static constexpr bool kMakesRows = false;      // true if the rows of that product may be sums of its own
  static constexpr int kBlockK = sm90::kBlockK;
  static constexpr int kParts = kGated ? 2 : 1;  // gate and up
  static constexpr int kThreads = 128 + 32;      // a consumer warpgroup and a producer warp
  static constexpr int kMaxCluster = kMaxStreamedSplitK;

  static constexpr int kWeightBytes = kRows * kBlockK * sizeof(Element);  // for each part
  static constexpr int kTokenBytes = kTokens * kBlockK * sizeof(Element);
  static constexpr int kStageBytes = kParts * kWeightBytes + kTokenBytes;
  static constexpr int kAlignment = 1024;
  static constexpr int kCtasPerMultiprocessor = kCtas;

  static constexpr int kPartialStride = kRows + 4;  // floats; the padding keeps the threads of a warp on distinct banks
  static constexpr int kPartialBytes = kParts * kTokens * kPartialStride * 4;
  // The shared memory of a CTA where a multiprocessor holds this many. The system takes 1024 bytes of each CTA's part.
  __host__ __device__ static constexpr int shared_limit(int ctas) { return 228 * 1024 / ctas - 1024; }
  static constexpr int kSharedLimit = shared_limit(kCtasPerMultiprocessor);
  static constexpr int kStages = (kSharedLimit - kAlignment) / (kStageBytes + 16);
  static constexpr int kSharedBytes = kStages * (kStageBytes + 16) + kAlignment;
  static_assert(kPartialBytes <= kStages * kStageBytes, "the sums are laid down where the ring was");
};

// For tiles of up to kColumns columns. The ring is cut at the launch, for as many CTAs as a multiprocessor is to hold.
template <typename Element, Product kProduct, int kTokens, int kColumns>
struct StreamedGemm : StreamedShape<Element, kProduct, kTokens, streamed_ctas(kColumns), kColumns / kStreamedColumns> {
  using Shape = StreamedShape<Element, kProduct, kTokens, streamed_ctas(kColumns), kColumns / kStreamedColumns>;
  static constexpr bool kSaysReadsOnce = true;
  static constexpr bool kTakesLowRank = true;
  static constexpr bool kStoresAlone = true;
  static constexpr bool kMakesRows = kProduct == Product::kPlain && kTokens <= kMostRankTermRows;
  static_assert(kColumns % kStreamedColumns == 0);

  static constexpr int part_bytes(int columns, int ranks) {
    return ((columns + 7) / 8 * 8 + ranks) * Shape::kBlockK * sizeof(Element);
  }
  static constexpr int stage_bytes(int columns, int ranks = 0) {
    return Shape::kParts * part_bytes(columns, ranks) + Shape::kTokenBytes;
  }
  // A wgmma of the last stage may read behind the ring: the tokens of the stage lie behind its weights.
  static constexpr int overrun(int columns, int ranks) {
    const int read = kColumns * Shape::kBlockK * static_cast<int>(sizeof(Element));
    const int behind = read - part_bytes(columns, ranks) - Shape::kTokenBytes;
    return behind > 0 ? behind : 0;
  }
  static constexpr int stages(int columns, int ranks, int shared_bytes) {
    return (shared_bytes - Shape::kAlignment - overrun(columns, ranks)) / (stage_bytes(columns, ranks) + 16);
  }
  static_assert(stages(kColumns, 0, Shape::kSharedLimit) >= 2);
  // The rows of an adapter lie behind the sums.
  static_assert(Shape::kPartialBytes + Shape::kAlignment <= Shape::kSharedLimit - stage_bytes(kColumns));
  static_assert(!kMakesRows || kTokens * kMostRankTermRanks * sizeof(float) <= stage_bytes(kColumns));
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The addresses of what a CTA keeps in shared memory.
template <typename Gemm>
struct StreamedGemmShared {
  uint32_t ring;
  int columns;
  int stages;
  int ranks;  // rows of a factor behind those of the columns

  __device__ __forceinline__ explicit StreamedGemmShared(const void* raw, int columns = Gemm::kRows,
                                                         int stages = Gemm::kStages, int ranks = 0)
      : ring((shared_address(raw) + Gemm::kAlignment - 1) & ~(Gemm::kAlignment - 1)),
        columns(columns),
        stages(stages),
        ranks(ranks) {}
  // The first row of the factor. A part of a stage begins where the swizzle does, every 8 rows.
  __device__ __forceinline__ int rank_row() const { return (columns + 7) / 8 * 8; }
  __device__ __forceinline__ int part_bytes() const {
    return (rank_row() + ranks) * (Gemm::kWeightBytes / Gemm::kRows);
  }
  __device__ __forceinline__ int stage_bytes() const { return Gemm::kParts * part_bytes() + Gemm::kTokenBytes; }
  __device__ __forceinline__ int loaded_bytes(int tokens) const {
    return (Gemm::kParts * columns + ranks + tokens) * Gemm::kBlockK * sizeof(typename Gemm::Element);
  }
  __device__ __forceinline__ uint32_t weight(int stage, int part) const {
    return ring + stage * stage_bytes() + part * part_bytes();
  }
  __device__ __forceinline__ uint32_t tokens(int stage) const { return weight(stage, Gemm::kParts); }
  __device__ __forceinline__ uint32_t full(int stage) const { return ring + stages * stage_bytes() + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stages + stage); }
  // The sums lie where the ring was.
  __device__ __forceinline__ uint32_t partial(int part, int token, int row) const {
    return ring + ((part * Gemm::kTokens + token) * Gemm::kPartialStride + row) * 4;
  }
  __device__ __forceinline__ uint32_t rank_sum(int token, int rank) const {
    return ring + Gemm::kPartialBytes + (token * ranks + rank) * 4;
  }
};

// A tile of an output whose rows all have the same weights. What the main loop knows of a tile it has from here: rows
// grouped by weights have another (grouped_gemm.cuh).
template <typename Gemm>
struct StreamedTile {
  using Element = typename Gemm::Element;
  const StreamedGemmArgs& args;
  int column;  // the first column of the output
  int first_token;

  __device__ __forceinline__ int weight_row() const { return column; }
  __device__ __forceinline__ bool alternates() const { return false; }
  __device__ __forceinline__ int tokens() const { return min(args.tokens, args.m - first_token); }
  __device__ __forceinline__ int loaded_tokens() const { return args.tokens; }
  __device__ __forceinline__ void load_tokens(uint32_t full, uint32_t tokens, int k) const {
    tma_load(&args.a, full, tokens, k, first_token);
  }
  __device__ __forceinline__ int rank_weight_row() const { return column; }
  __device__ __forceinline__ void load_rank_rows(uint32_t full, uint32_t tokens, int k) const {
    tma_load(&args.low_rank.rows, full, tokens, k, first_token);
  }
  __device__ __forceinline__ int64_t out_row(int token) const { return first_token + token; }

  // The sum of four adjacent columns of an operand, and its bias.
  __device__ __forceinline__ float4 finished(Operand operand, float4 sum, int first) const {
    const void* bias = operand == Operand::kGate ? args.epilogue.bias : args.epilogue.up_bias;
    if (bias == nullptr) return sum;
    const float2 low = to_float2(load_bias_pair<Element>(bias, first, args.n));
    const float2 high = to_float2(load_bias_pair<Element>(bias, first + 2, args.n));
    return make_float4(sum.x + low.x, sum.y + low.y, sum.z + high.x, sum.w + high.y);
  }
};

// Brings the k blocks [k.x, k.y) into the ring. Run by one thread.
template <typename Gemm, typename Tile>
class Producer {
 public:
  __device__ __forceinline__ Producer(const StreamedGemmArgs& args, const StreamedGemmShared<Gemm>& shared,
                                      const Tile& tile, int2 k)
      : args_(args),
        shared_(shared),
        tile_(tile),
        k_{k.x, Gemm::kTakesLowRank ? max(k.x, min(k.y, args.own_blocks)) : k.y},
        last_(k.y),
        stage_bytes_(shared.loaded_bytes(tile.loaded_tokens())),
        at_(shared.stages, 1) {}  // all stages are empty

  __device__ __forceinline__ void run() {
    // A ring of no more stages than are loaded together would not release its last one before another block arrives.
    if (args_.blocks_together > 1 && shared_.stages > kMostBlocksTogether) {
      load_all<kMostBlocksTogether>();
    } else {
      load_all<1>();
    }
    if constexpr (Gemm::kTakesLowRank) {
#pragma unroll 1
      for (int block = k_.y; block < last_; ++block) load_low_rank(block - args_.own_blocks);
    }
  }

 private:
  // Asks for kBlocks blocks at a time.
  template <int kBlocks>
  __device__ __forceinline__ void load_all() {
    // In the first round, only weights are read until the kernel that writes a is done. Where it is, the first block
    // must not wait for all weights of the round: that takes microseconds, in which nothing else would be asked for.
    const int first_round = min(k_.y, k_.x + shared_.stages / kBlocks * kBlocks);
    // Not unrolled: code that is run for the first time comes from memory, which takes longer than a block's copies.
#pragma unroll 1
    for (int block = k_.x; block < first_round; block += kBlocks) load<kBlocks, true>(block, !args_.starts_early);
    if (args_.starts_early) {
      wait_for_previous_kernel();
#pragma unroll 1
      for (int block = k_.x; block < first_round; ++block) load_tokens(block - k_.x, block);
    }
#pragma unroll 1
    for (int block = first_round; block < k_.y; block += kBlocks) load<kBlocks, false>(block, true);
  }

  // Loads kBlocks blocks, or those that are left, as soon as there is room for all of them: in the first round at once.
  template <int kBlocks, bool kFirstRound>
  __device__ __forceinline__ void load(int block, bool with_tokens) {
    const int blocks = min(kBlocks, k_.y - block);
    const auto for_each = [&](auto&& visit) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i < blocks) visit(i);
      }
    };
    int stages[kBlocks];
    for_each([&](int i) {
      stages[i] = at_.stage;
      if (!kFirstRound) mbarrier_wait(shared_.empty(at_.stage), at_.parity);
      at_.advance();
    });
    for_each([&](int i) { mbarrier_arrive_expect(shared_.full(stages[i]), stage_bytes_); });
    if constexpr (Gemm::kTransposed) {
      for_each([&](int i) { tile_.load_weights(shared_.full(stages[i]), shared_.weight(stages[i], 0), block + i); });
    } else {
      for_each([&](int i) { load_part(args_.weight, stages[i], 0, block + i); });
      if (Gemm::kGated) for_each([&](int i) { load_part(args_.up_weight, stages[i], 1, block + i); });
      if (Gemm::kMakesRows && shared_.ranks > 0) for_each([&](int i) { load_factor(stages[i], block + i); });
    }
    if (with_tokens) for_each([&](int i) { load_tokens(stages[i], block + i); });
  }

  __device__ __forceinline__ void load_part(const CUtensorMap& weight, int stage, int part, int block) const {
    const uint32_t full = shared_.full(stage), to = shared_.weight(stage, part);
    if (Gemm::kSaysReadsOnce && args_.reads_once) {
      tma_load(&weight, full, to, block * Gemm::kBlockK, tile_.weight_row(), first_to_leave_l2());
    } else {
      tma_load(&weight, full, to, block * Gemm::kBlockK, tile_.weight_row());
    }
  }

  __device__ __forceinline__ void load_factor(int stage, int block) const {
    constexpr int kRowBytes = Gemm::kWeightBytes / Gemm::kRows;
    const uint32_t to = shared_.weight(stage, 0) + shared_.rank_row() * kRowBytes;
    tma_load(&args_.low_rank.rows, shared_.full(stage), to, block * Gemm::kBlockK, 0);
  }

  __device__ __forceinline__ void load_low_rank(int block) {
    const LowRankArgs& term = args_.low_rank;
    const int column = block * Gemm::kBlockK;
    mbarrier_wait(shared_.empty(at_.stage), at_.parity);
    const uint32_t full = shared_.full(at_.stage);
    mbarrier_arrive_expect(full, stage_bytes_);
    tma_load(&term.weight, full, shared_.weight(at_.stage, 0), column + term.shift, tile_.rank_weight_row());
    if (Gemm::kGated) {
      tma_load(&term.up_weight, full, shared_.weight(at_.stage, 1), column + term.up_shift, tile_.rank_weight_row());
    }
    tile_.load_rank_rows(full, shared_.tokens(at_.stage), column);
    at_.advance();
  }

  __device__ __forceinline__ void load_tokens(int stage, int block) const {
    tile_.load_tokens(shared_.full(stage), shared_.tokens(stage), block * Gemm::kBlockK);
  }

  const StreamedGemmArgs& args_;
  const StreamedGemmShared<Gemm>& shared_;
  const Tile& tile_;
  const int2 k_;    // without the blocks of the low-rank term
  const int last_;  // with them
  const uint32_t stage_bytes_;
  RingPosition at_;
};

// The sums of a thread, of both parts, as Wgmma has them.
template <typename Gemm>
using StreamedSums = float[Gemm::kParts * Gemm::kGroups][Gemm::kTokens / 2];

// The consumers: multiply the blocks as they arrive.
template <typename Gemm>
__device__ __forceinline__ void multiply(const StreamedGemmShared<Gemm>& shared, int2 k,
                                         StreamedSums<Gemm>& accumulator) {
  using Mma = Wgmma<typename Gemm::Element, Gemm::kTokens, false, Gemm::kTransposed>;
  const auto weight_descriptor = [](uint32_t weight, int step) {
    return Gemm::kTransposed ? transposed_wgmma_descriptor(weight + step * kTransposedStepBytes)
                             : wgmma_descriptor(weight + step * kWgmmaStepBytes);
  };
  constexpr int kMmas = Gemm::kParts * Gemm::kGroups;
  constexpr int kGroupBytes = Gemm::kWeightBytes / Gemm::kGroups;
  const auto fence = [&] {
#pragma unroll
    for (int mma = 0; mma < kMmas; ++mma) fence_accumulator(accumulator[mma]);
  };
  RingPosition at(shared.stages);
  int previous = 0;
  for (int block = k.x; block < k.y; ++block, at.advance()) {
    mbarrier_wait(shared.full(at.stage), at.parity);
    fence();
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Gemm::kBlockK / kWgmmaK; ++step) {
#pragma unroll
      for (int mma = 0; mma < kMmas; ++mma) {
        const uint32_t weight = shared.weight(at.stage, mma / Gemm::kGroups) + mma % Gemm::kGroups * kGroupBytes;
        Mma::multiply(accumulator[mma], weight_descriptor(weight, step),
                      wgmma_descriptor(shared.tokens(at.stage) + step * kWgmmaStepBytes), true);
      }
    }
    wgmma_commit();
    fence();
    wgmma_wait<1>();
    if (block > k.x && threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty(previous));
    previous = at.stage;
  }
  wgmma_wait<0>();
  fence();
}

// Leaves the CTA's sums in shared.partial.
template <typename Gemm>
__device__ __forceinline__ void lay_down(const StreamedGemmShared<Gemm>& shared,
                                         const StreamedSums<Gemm>& accumulator) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  named_barrier_sync(1, 128);  // the sums go where the ring was: all warps must be done with it
#pragma unroll
  for (int mma = 0; mma < Gemm::kParts * Gemm::kGroups; ++mma) {
#pragma unroll
    for (int i = 0; i < Gemm::kTokens / 2; ++i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int row = mma % Gemm::kGroups * kStreamedColumns + warp * 16 + i / 2 % 2 * 8 + lane / 4;
      store_shared_float(shared.partial(mma / Gemm::kGroups, token, row), accumulator[mma][i]);
    }
  }
}

// Adds the sums of the cluster for one token and four adjacent weight rows, in the order of the ranks.
template <typename Gemm>
__device__ __forceinline__ float4 sum_partials(const StreamedGemmShared<Gemm>& shared, int part, int token, int row,
                                               int ranks) {
  const uint32_t address = shared.partial(part, token, row);
  float4 terms[Gemm::kMaxCluster];
#pragma unroll
  for (int source = 0; source < Gemm::kMaxCluster; ++source) {
    if (source < ranks) terms[source] = load_cluster_float4(map_to_rank(address, source));
  }
  float4 sum = terms[0];
#pragma unroll
  for (int source = 1; source < Gemm::kMaxCluster; ++source) {
    if (source < ranks) {
      sum.x += terms[source].x;
      sum.y += terms[source].y;
      sum.z += terms[source].z;
      sum.w += terms[source].w;
    }
  }
  return sum;
}

// The same where columns of gate and up alternate: of four columns of the output.
template <typename Gemm>
__device__ __forceinline__ float4 sum_alternating(const StreamedGemmShared<Gemm>& shared, Operand operand, int token,
                                                  int row, int ranks) {
  const int part = row * 2 / Gemm::kRows, first = row * 2 % Gemm::kRows;
  const float4 low = sum_partials(shared, part, token, first, ranks);
  const float4 high = sum_partials(shared, part, token, first + 4, ranks);
  return operand == Operand::kGate ? make_float4(low.x, low.z, high.x, high.z)
                                   : make_float4(low.y, low.w, high.y, high.w);
}

// Asks for the tile's rows of b, by sectors.
template <typename Element>
__device__ __forceinline__ void prefetch_b(const LowRankArgs& term, int first, int columns, int n) {
  constexpr int kSector = 32 / sizeof(Element);
  const int sectors = (term.ranks + kSector - 1) / kSector;
  for (int i = threadIdx.x; i < columns * sectors; i += 128) {
    const int column = min(first + i / sectors, n - 1);
    prefetch<Element>(term.b.data, column * term.b.row_stride + i % sectors * kSector);
  }
}

// Leaves the rows of the adapter, of all tokens, in shared.rank_sum.
template <typename Gemm>
__device__ __forceinline__ void make_rank_rows(const LowRankArgs& term, const StreamedGemmShared<Gemm>& shared,
                                               int tokens, int cluster) {
  const int quads = shared.ranks / 4;
  for (int index = threadIdx.x; index < tokens * quads; index += 128) {
    const int token = index / quads, rank = index % quads * 4;
    const float4 sum = sum_partials(shared, 0, token, shared.rank_row() + rank, cluster);
    const float four[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared_float(shared.rank_sum(token, rank + i), term.scale * four[i]);
  }
  named_barrier_sync(1, 128);
}

// An adapter's row of a token times its b, in four adjacent columns.
template <typename Gemm>
__device__ __forceinline__ float4 rank_terms(const LowRankArgs& term, const StreamedGemmShared<Gemm>& shared, int token,
                                             int column) {
  using Element = typename Gemm::Element;
  constexpr int kVector = kVectorBytes / sizeof(Element), kColumns = 4;
  const Element* const b = static_cast<const Element*>(term.b.data) + column * term.b.row_stride;
  float sums[kColumns] = {};
  for (int first = 0; first < term.ranks; first += kVector) {
    const float4 low = load_shared_float4(shared.rank_sum(token, first));
    const float4 high = load_shared_float4(shared.rank_sum(token, first + 4));
    const float row[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const Element* const of_column = b + i * term.b.row_stride + first;
      if (first + kVector <= term.ranks) {
        const auto eight = *reinterpret_cast<const Packed<Element, kVector>*>(of_column);
#pragma unroll
        for (int at = 0; at < kVector; ++at) sums[i] += row[at] * eight.lane(at);
      } else {
#pragma unroll
        for (int at = 0; at < kVector; ++at) {
          if (first + at < term.ranks) sums[i] += row[at] * to_float(of_column[at]);
        }
      }
    }
  }
  return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

// Stores this CTA's share of the tile. Each thread takes four adjacent columns of a token.
template <typename Gemm, typename Tile>
__device__ __forceinline__ void finish(const StreamedGemmArgs& args, const StreamedGemmShared<Gemm>& shared,
                                       const Tile& tile, int rank, int ranks) {
  using Element = typename Gemm::Element;
  const int quads = shared.columns / 4;
  for (int index = rank * 128 + threadIdx.x; index < tile.tokens() * quads; index += ranks * 128) {
    const int token = index / quads;
    const int row = index % quads * 4;
    const int column = tile.column + row;
    if (column >= args.n) continue;
    const auto sums = [&](Operand operand, auto&& take) {
      const int part = operand == Operand::kGate ? 0 : 1;
      float4 sum;
      if (Gemm::kTransposed && Gemm::kGated && tile.alternates()) {
        sum = sum_alternating(shared, operand, token, row, ranks);
      } else {
        sum = sum_partials(shared, part, token, row, ranks);
      }
      if constexpr (Gemm::kMakesRows) {
        if (shared.ranks > 0) {
          const float4 term = rank_terms(args.low_rank, shared, token, column);
          sum = make_float4(sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w);
        }
      }
      sum = tile.finished(operand, sum, column);
      take(0, sum.x), take(1, sum.y), take(2, sum.z), take(3, sum.w);
    };
    float value[4];
    GluEpilogue<Gemm::kProduct>::apply(value, CodedActivation<Element>{args.epilogue.activation}, sums);
    const int64_t out_row = tile.out_row(token);
    const auto pair = [&](int i) {
      return with_addend<Element, Gemm::kProduct>(args.epilogue, round_pair<Element>(value[i], value[i + 1]), out_row,
                                                  column + i);
    };
    *reinterpret_cast<uint2*>(static_cast<Element*>(args.out) + out_row * args.out_stride + column) =
        make_uint2(pair(0), pair(2));
  }
}

// Stores a tile whose sums are those of one CTA, from registers. Results are transposed on their way: a thread has sums
// of one column and several tokens, and stores two columns of a token.
template <typename Gemm>
__device__ __forceinline__ void store_alone(const StreamedGemmArgs& args, const StreamedTile<Gemm>& tile,
                                            const StreamedSums<Gemm>& accumulator) {
  using Element = typename Gemm::Element;
  constexpr int kCount = Gemm::kTokens / 4;  // results of a thread in 8 columns
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int group = 0; group < Gemm::kGroups; ++group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = group * kStreamedColumns + warp * 16 + half * 8;
      const auto bias_of = [&](const void* bias) {
        const int column = min(tile.column + row + lane / 4, args.n - 1);  // past the end nothing is stored
        return bias == nullptr ? 0.0f : static_cast<float>(__ldg(static_cast<const Element*>(bias) + column));
      };
      const auto sums = [&](Operand operand, auto&& take) {
        const int mma = (operand == Operand::kGate ? 0 : Gemm::kGroups) + group;
        const float bias = bias_of(operand == Operand::kGate ? args.epilogue.bias : args.epilogue.up_bias);
#pragma unroll
        for (int i = 0; i < kCount; ++i) take(i, accumulator[mma][i / 2 * 4 + half * 2 + i % 2] + bias);
      };
      float value[kCount];
      GluEpilogue<Gemm::kProduct>::apply(value, CodedActivation<Element>{args.epilogue.activation}, sums);
      const int column = row + lane % 4 * 2;
      const bool inside = column < args.columns && tile.column + column < args.n;
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const uint32_t pair = transposed_matrix(round_pair<Element>(value[i], value[i + 1]));
        const int token = i * 4 + lane / 4;
        if (inside && token < tile.tokens()) {
          const int64_t out_row = tile.out_row(token);
          Element* out = static_cast<Element*>(args.out) + out_row * args.out_stride + tile.column + column;
          *reinterpret_cast<uint32_t*>(out) =
              with_addend<Element, Gemm::kProduct>(args.epilogue, pair, out_row, tile.column + column);
        }
      }
    }
  }
}

// Initialises the ring's barriers. The CTA's threads have to meet before they use them.
template <typename Gemm>
__device__ __forceinline__ void prepare_to_stream(const StreamedGemmArgs& args,
                                                  const StreamedGemmShared<Gemm>& shared) {
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.weight);
    if (Gemm::kGated) prefetch_tensor_map(&args.up_weight);
    prefetch_tensor_map(&args.a);
    for (int stage = 0; stage < shared.stages; ++stage) {
      mbarrier_init(shared.full(stage), 1);
      mbarrier_init(shared.empty(stage), 4);  // one arrival for each of the consumers' warps
    }
    fence_mbarrier_init();
  }
}

// Computes a CTA's share of a tile.
template <typename Gemm, typename Tile>
__device__ __forceinline__ void compute(const StreamedGemmArgs& args, const StreamedGemmShared<Gemm>& shared,
                                        const Tile& tile, int rank, int ranks) {
  const int loads = (args.k_blocks + args.blocks_together - 1) / args.blocks_together;
  const auto first_block = [&](int rank) { return min(rank * loads / ranks * args.blocks_together, args.k_blocks); };
  const int2 k{first_block(rank), first_block(rank + 1)};
  const bool alone = Gemm::kStoresAlone && ranks == 1 && shared.ranks == 0;
  if (threadIdx.x < 128) {
    StreamedSums<Gemm> accumulator = {};
    multiply<Gemm>(shared, k, accumulator);
    if constexpr (Gemm::kStoresAlone) {
      if (alone) return store_alone<Gemm>(args, tile, accumulator);
    }
    lay_down<Gemm>(shared, accumulator);
  } else {
    if (threadIdx.x == 128) Producer<Gemm, Tile>(args, shared, tile, k).run();
    __syncwarp();
    if (alone) return;
  }
  cluster_sync();
  if (threadIdx.x < 128) {
    if (Gemm::kMakesRows && shared.ranks > 0) make_rank_rows(args.low_rank, shared, tile.tokens(), ranks);
    finish<Gemm>(args, shared, tile, rank, ranks);
  }
  cluster_sync();  // no CTA exits while the others still read its sums
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Gemm>
__global__ void __launch_bounds__(Gemm::kThreads, Gemm::kCtasPerMultiprocessor)
    streamed_gemm_kernel(const __grid_constant__ StreamedGemmArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t raw_shared[];
  const int loaded_ranks = Gemm::kMakesRows ? args.low_rank.loaded_ranks : 0;
  const StreamedGemmShared<Gemm> shared(raw_shared, args.columns, args.stages, loaded_ranks);
  const int rank = cluster_rank();
  const int ranks = cluster_size();
  const int index = blockIdx.x / ranks;
  const StreamedTile<Gemm> tile{args, index / args.tiles_m * args.columns, index % args.tiles_m * args.tokens};

  prepare_to_stream(args, shared);
  __syncthreads();
  allow_next_kernel();
  if (threadIdx.x < 128) {
    prefetch_biases<typename Gemm::Element>(args.epilogue, tile.column, args.columns, args.n);
    if (loaded_ranks > 0) prefetch_b<typename Gemm::Element>(args.low_rank, tile.column, args.columns, args.n);
  }
  compute(args, shared, tile, rank, ranks);
#endif
}

}  // namespace fused_mlp::sm90
