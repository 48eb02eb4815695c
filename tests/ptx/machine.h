// The state of the running interpreter: a launch's thread blocks one after the other, their warps, and their
// registers.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <random>

#include "program.h"

namespace ptx {

// How the machine behaves where the PTX ISA leaves it open.
struct Options {
  // Approximations are the nearest float, or the "farthest" that is allowed, or a "random" one.
  std::string approximate = "nearest";
  int turn = 0;            // another warp of the thread block goes on after about so many instructions; 0: at barriers
  bool any_path = false;   // of diverged lanes any go on, rather than those at the lowest instruction
  bool any_order = false;  // of thread blocks and warps, rather than rising
  // Loads from global memory stand in for asynchronous copies, which sm_75 has not. As with these, words of 16 bytes
  // may have bytes that other threads write, which come as random ones, and a later write is no race with the load.
  bool loads_for_copies = false;
  int seed = 1;
};
Options& options();
u32 random_below(u32 n);
u8 random_byte();

// Notes what no kernel may do, the first time that it happens in a function.
void report(const std::string& what, const std::string& function, const std::string& where = "");
// Reports since the last call, each "what, function, where".
std::vector<std::string> take_reports();

struct Counters {
  u64 launches = 0, instructions = 0, agreements = 0;  // of votes: how often all lanes said yes
};
Counters& counters();

// Who wrote and read a byte last in this launch, and in which epoch of its warp and thread block: barriers end epochs.
struct Access {
  u32 launch = 0;
  u32 writer = ~0u, writer_warp_epoch = 0, writer_block_epoch = 0;
  u32 reader = ~0u, reader_warp_epoch = 0, reader_block_epoch = 0;
  enum Readers : u8 { kOne, kOfWarp, kOfBlock, kOfGrid } readers = kOne;
  bool is_atomic = false;
};

enum class Byte : u8 { kUndefined, kDefined, kPending };  // pending: an asynchronous copy has yet to write it

struct AsyncCopy {
  u32 to;
  u64 from;
  u32 bytes, read;  // bytes after those that are read become zeros
  u8 data[16];
  Byte state[16];
};
struct LaneCopies {
  std::vector<AsyncCopy> begun;
  std::deque<std::vector<AsyncCopy>> groups;
};

// A function's registers, once per lane, and its memory. The masks say which lanes' registers are undefined.
struct Frame {
  Frame(Function& function, u32 lanes);

  Function& f;
  std::vector<u32> bits32, undefined32;
  std::vector<u64> bits64;
  std::vector<u32> undefined64, predicates, undefined_predicates;
  std::vector<u8> parameters, local;  // each lane's after the other
  std::vector<Byte> local_state;
  u32 pc[kWarp] = {};
  u32 live, waiting = 0;  // lanes
  u32 parked = 0;         // at a call, until the others come there or wait (Options::any_path alone)
  bool at_barrier = false;
};

struct Block {
  const Function& kernel;
  u32 index, threads, epoch = 1;
  const std::vector<u8>& parameters;
  std::vector<u8> shared;
  std::vector<Byte> shared_state;
  std::vector<Access> shared_access;
};

struct Warp {
  Warp(Block& of, u32 number, u32 lanes);

  Block& block;
  u32 index;   // in the thread block
  u32 exited;  // lanes
  u32 epoch = 1;
  std::unique_ptr<Frame> kernel_frame;
  Frame* frame;  // of the function that runs
  LaneCopies copies[kWarp];

  u32 thread(int lane) const { return index * kWarp + static_cast<u32>(lane); }

  const u32* read32(const Operand& o) const {
    return (o.bank == Bank::kBits32 ? frame->bits32 : frame->f.constants32).data() + o.index * kWarp;
  }
  const u64* read64(const Operand& o) const {
    return (o.bank == Bank::kBits64 ? frame->bits64 : frame->f.constants64).data() + o.index * kWarp;
  }
  u64 value(const Operand& o, int lane) const { return o.wide() ? read64(o)[lane] : read32(o)[lane]; }
  u32* write32(const Operand& o) { return frame->bits32.data() + o.index * kWarp; }
  u64* write64(const Operand& o) { return frame->bits64.data() + o.index * kWarp; }
  u32 predicate(const Operand& o) const {
    const u32 p = frame->predicates[static_cast<size_t>(o.index)];
    return o.negated ? ~p : p;
  }
  void set_predicate(const Operand& o, u32 value, u32 mask) {
    if (o.bank != Bank::kPredicate) return;
    u32& p = frame->predicates[static_cast<size_t>(o.index)];
    p = (p & ~mask) | (value & mask);
  }
  // Lanes in which an operand is undefined.
  u32 undefined(const Operand& o) const {
    const u32* const found = const_cast<Warp*>(this)->undefined_of(o);
    return found ? *found : 0;
  }
  void mark(const Operand& o, u32 undefined, u32 mask) {
    if (u32* const found = undefined_of(o)) *found = (*found & ~mask) | (undefined & mask);
  }
  void report(const char* what, const Instruction& i, const std::string& detail = "") const {
    ptx::report(what, frame->f.name, "line " + std::to_string(i.line) + ": " + i.text + "; " + detail);
  }

 private:
  u32* undefined_of(const Operand& o) {
    const auto at = static_cast<size_t>(o.index);
    switch (o.bank) {
      case Bank::kBits32:
        return &frame->undefined32[at];
      case Bank::kBits64:
        return &frame->undefined64[at];
      case Bank::kPredicate:
        return &frame->undefined_predicates[at];
      default:
        return nullptr;
    }
  }
};

// Runs a launch. Throws std::runtime_error where it cannot go on.
void launch(Function& f, u32 grid, u32 block, u32 dynamic_shared, const std::vector<u8>& parameters);

// Calls f(lane) for the lanes of a mask.
template <class F>
inline void for_lanes(u32 mask, F f) {
  if (mask == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kWarp; ++lane) f(lane);
  } else {
    for (u32 rest = mask; rest; rest &= rest - 1) f(__builtin_ctz(rest));
  }
}

// Bits of a number; the device has one NaN.
inline u32 bits_of(float x) {
  u32 bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x != x ? 0x7fffffffu : bits;
}
inline u64 bits_of(double x) {
  u64 bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(u32 bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline double double_of(u64 bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// memory.cpp
void add_allocation(u64 address, u64 bytes);
void remove_allocation(u64 address);
void begin_launch();
void load_memory(Warp& w, const Instruction& i, u32 mask);
void store_memory(Warp& w, const Instruction& i, u32 mask);
void atomic(Warp& w, const Instruction& i, u32 mask);  // of 64 bits: the larger number with an immediate, else the sum
void begin_copy(Warp& w, const Instruction& i, u32 mask);
void commit_copies(Warp& w, const Instruction& i, u32 mask);
void wait_for_copies(Warp& w, const Instruction& i, u32 mask);
// Lanes that end must have waited for their copies.
void check_copies_at_end(const Warp& w, u32 mask);

// approximate.cpp: rcp.approx.ftz.f32 and rsqrt.approx.ftz.f32, on bits.
u32 approximate_reciprocal(u32 bits);
u32 approximate_reciprocal_root(u32 bits);

}  // namespace ptx
