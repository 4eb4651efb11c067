// Rounds of propagation on the CPU:  x <- (1 - restart) A x + restart signal,  A a table of neighbours with weights.
//
// Built by native/__init__.py, called by XLA. Per gathered row of 8 channels: one load, one fused multiply-add.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Ints = ffi::Buffer<ffi::S32, 2>;
using Floats = ffi::Buffer<ffi::F32, 2>;
using Scalar = ffi::Buffer<ffi::F32, 0>;

constexpr int64_t kWidth = 8;    // channels in one vector register; the caller pads to a multiple
constexpr int64_t kTile = 256;   // nodes whose sums stay in the first-level cache (8 KiB) while all slots pass
constexpr int64_t kTogether = 4; // slots added per load and store of a sum
constexpr int64_t kAhead = 16;   // nodes ahead of which a sender's row is asked for: rows lie anywhere in memory
constexpr int64_t kTiles = 4;    // tiles that a thread takes at a time

typedef float Row __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

struct Round {
  const int32_t* table;  // [slots, nodes]
  const float* weight;   // [slots, nodes]
  const float* signal;   // [nodes, channels]
  const float* x;        // [nodes, channels]
  float* out;            // [nodes, channels]
  int64_t slots, nodes, channels;
  float restart;
};

// Adds `Slots` neighbours of every node of a tile to its sum; whether all of them are nodes.
template <int64_t Slots>
bool Add(const Round& round, int64_t slot, int64_t first, int64_t count, int64_t column, Row* total) {
  const int32_t* senders = round.table + slot * round.nodes + first;
  const float* weights = round.weight + slot * round.nodes + first;
  const float* x = round.x + column;
  const uint32_t nodes = static_cast<uint32_t>(round.nodes);
  const int64_t last = round.nodes - 1 - first;
  bool wrong = false;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t later = std::min(i + kAhead, last);
    Row sum = total[i];
    for (int64_t s = 0; s < Slots; ++s) {
      const uint32_t soon = senders[s * round.nodes + later];
      __builtin_prefetch(x + (soon < nodes ? soon : 0) * round.channels);
      const uint32_t sender = senders[s * round.nodes + i];
      wrong |= sender >= nodes;
      const Row row = *reinterpret_cast<const Row*>(x + (sender < nodes ? sender : 0) * round.channels);
      sum += weights[s * round.nodes + i] * row;
    }
    total[i] = sum;
  }
  return !wrong;
}

bool Tile(const Round& round, int64_t first, int64_t count) {
  bool valid = true;
  for (int64_t column = 0; column < round.channels; column += kWidth) {
    Row total[kTile];
    std::memset(total, 0, sizeof(Row) * count);
    int64_t slot = 0;
    for (; slot + kTogether <= round.slots; slot += kTogether) {
      valid &= Add<kTogether>(round, slot, first, count, column, total);
    }
    for (; slot < round.slots; ++slot) valid &= Add<1>(round, slot, first, count, column, total);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (first + i) * round.channels + column;
      const Row source = *reinterpret_cast<const Row*>(round.signal + at);
      *reinterpret_cast<Row*>(round.out + at) = (1.0f - round.restart) * total[i] + round.restart * source;
    }
  }
  return valid;
}

// Shares blocks among XLA's threads and the calling one. The caller works too, so it never waits for a busy pool; a
// task that starts after the last block was taken touches nothing but `progress`, which it owns.
template <typename Work>
void ForBlocks(ffi::ThreadPool& pool, int64_t blocks, const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  auto run = [progress, blocks, &work] {
    for (int64_t block; (block = progress->next.fetch_add(1)) < blocks;) {
      work(block);
      progress->done.fetch_add(1);
    }
  };
  for (int64_t i = 1; i < std::min(pool.num_threads(), blocks); ++i) {
    auto task = run;
    pool.Schedule(std::move(task));
  }
  run();
  while (progress->done.load() < blocks) std::this_thread::yield();
}

ffi::Error Diffuse(ffi::ThreadPool pool, Ints table, Floats weight, Floats signal, Scalar restart,
                   ffi::Result<Floats> out, ffi::Result<Floats> scratch, int64_t rounds) {
  const int64_t slots = table.dimensions()[0], nodes = table.dimensions()[1], channels = signal.dimensions()[1];
  if (channels % kWidth) return ffi::Error::InvalidArgument("channels must be padded to a multiple of 8");
  const float* x = signal.typed_data();
  if (rounds == 0) std::memcpy(out->typed_data(), x, out->size_bytes());
  std::atomic<bool> valid{true};
  for (int64_t left = rounds; left > 0; --left) {
    float* to = left % 2 ? out->typed_data() : scratch->typed_data();  // the last round writes the result
    const Round round{table.typed_data(), weight.typed_data(), signal.typed_data(), x, to,
                      slots, nodes, channels, *restart.typed_data()};
    constexpr int64_t kBlock = kTile * kTiles;
    ForBlocks(pool, (nodes + kBlock - 1) / kBlock, [&](int64_t block) {
      const int64_t end = std::min(nodes, (block + 1) * kBlock);
      for (int64_t first = block * kBlock; first < end; first += kTile) {
        if (!Tile(round, first, std::min(kTile, end - first))) valid = false;
      }
    });
    x = to;
  }
  return valid ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kOutOfRange, "the table names a node that does not exist");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EnvschedDiffuse, Diffuse,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Scalar>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("rounds"));
