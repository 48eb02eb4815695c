// Loads, stores, atomics and asynchronous copies, checked: bounds, alignment, undefined bytes, races.
#include <algorithm>
#include <cstdio>
#include <mutex>
#include <unordered_map>

#include "machine.h"

namespace ptx {
namespace {

// Tensors by address, and the bytes of each. Other threads of the process allocate and free, too.
std::map<u64, u64> allocations;
std::mutex allocations_lock;

u32 launch_number = 0;

struct Range {
  u64 begin = 0, end = 0;
  bool has(u64 address, u64 bytes) const { return begin <= address && address + bytes <= end; }
};
// The allocation at an address; an empty range if there is none.
Range range_of(u64 address) {
  static Range last;
  static u32 seen_launch = 0;
  if (seen_launch == launch_number && last.has(address, 1)) return last;
  const std::lock_guard<std::mutex> lock(allocations_lock);
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return {};
  --after;
  const Range found{after->first, after->first + after->second};
  if (!found.has(address, 1)) return {};
  seen_launch = launch_number;
  return last = found;
}

constexpr u64 kPage = 4096;
std::unordered_map<u64, std::unique_ptr<Access[]>> pages;

Access& global_access(u64 address) {
  static u64 last_page = ~0ull;
  static Access* accesses = nullptr;
  const u64 page = address / kPage;
  if (page != last_page || pages.empty()) {
    auto& found = pages[page];
    if (!found) found.reset(new Access[kPage]);
    last_page = page;
    accesses = found.get();
  }
  Access& access = accesses[address % kPage];
  if (access.launch != launch_number) {
    access = Access();
    access.launch = launch_number;
  }
  return access;
}

std::string hex(u64 x) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

constexpr u32 kBlock = 1024;  // threads at most
struct Who {
  u32 thread, warp_epoch, block_epoch;
};
Who who(const Warp& w, int lane) { return {w.block.index * kBlock + w.thread(lane), w.epoch, w.block.epoch}; }

// Whether no barrier lies between an earlier access of a thread and this one.
bool is_unordered(u32 thread, u32 warp_epoch, u32 block_epoch, const Who& now) {
  if (thread == ~0u || thread == now.thread) return false;
  if (thread / kBlock != now.thread / kBlock) return true;
  return thread / kWarp == now.thread / kWarp ? warp_epoch == now.warp_epoch : block_epoch == now.block_epoch;
}
bool writer_is_unordered(const Access& a, const Who& now) {
  return is_unordered(a.writer, a.writer_warp_epoch, a.writer_block_epoch, now);
}
bool readers_are_unordered(const Access& a, const Who& now) {
  if (a.reader == ~0u) return false;
  const bool same_warp = a.reader / kWarp == now.thread / kWarp;
  if (a.reader / kBlock != now.thread / kBlock || a.readers == Access::kOfGrid) return true;
  if (a.readers == Access::kOne) return is_unordered(a.reader, a.reader_warp_epoch, a.reader_block_epoch, now);
  if (a.readers == Access::kOfWarp && same_warp) return a.reader_warp_epoch == now.warp_epoch;
  return a.reader_block_epoch == now.block_epoch;
}

void note_read(const Warp& w, const Instruction& i, Access& a, const Who& now) {
  if (writer_is_unordered(a, now)) w.report("race: a read of what another thread writes", i);
  if (!readers_are_unordered(a, now)) {
    a.readers = Access::kOne;
  } else if (a.reader != now.thread) {
    const auto common = a.reader / kBlock != now.thread / kBlock ? Access::kOfGrid
                        : a.reader / kWarp != now.thread / kWarp ? Access::kOfBlock
                                                                 : Access::kOfWarp;
    a.readers = std::max(a.readers, common);
  }
  a.reader = now.thread, a.reader_warp_epoch = now.warp_epoch, a.reader_block_epoch = now.block_epoch;
}

// changes: whether the byte becomes another. Threads may write the same value to one place.
void note_write(const Warp& w, const Instruction& i, Access& a, const Who& now, bool changes, bool is_atomic = false) {
  if (changes && writer_is_unordered(a, now) && !(is_atomic && a.is_atomic)) w.report("race: two threads write", i);
  if (changes && !is_atomic && readers_are_unordered(a, now)) w.report("race: a write of what another thread reads", i);
  a.writer = now.thread, a.writer_warp_epoch = now.warp_epoch, a.writer_block_epoch = now.block_epoch;
  a.is_atomic = is_atomic;
}

bool check_alignment(const Warp& w, const Instruction& i, u64 address, u32 bytes) {
  if (address % bytes == 0) return true;
  w.report("misaligned", i, std::to_string(bytes) + " bytes at " + hex(address));
  return false;
}

bool check_global(const Warp& w, const Instruction& i, u64 address, u32 bytes) {
  if (!check_alignment(w, i, address, bytes)) return false;
  const Range found = range_of(address);
  if (found.has(address, bytes)) return true;
  w.report(
      "out of bounds", i,
      std::to_string(bytes) + " bytes at " + hex(address) +
          (found.end ? ", " + std::to_string(found.end - address) + " before the end of a tensor" : ", in no tensor"));
  return false;
}

bool check_shared(const Warp& w, const Instruction& i, u32 address, u32 bytes) {
  if (!check_alignment(w, i, address, bytes)) return false;
  if (address >= kSharedBase && address - kSharedBase + bytes <= w.block.shared.size()) return true;
  w.report("out of bounds", i,
           "shared memory has " + std::to_string(w.block.shared.size()) + " bytes, not the " + std::to_string(bytes) +
               " from " + std::to_string(i64{address} - kSharedBase));
  return false;
}

// Whether some bytes of a word of 16, but not all, belong to a tensor. A kernel may read such a word, since it lies in
// one page with them: the other bytes are arbitrary.
bool is_part(u64 word) {
  if (range_of(word).has(word, 16)) return false;
  for (u64 b = 0; b < 16; ++b)
    if (range_of(word + b).end) return true;
  return false;
}

u8 byte_or_random(u64 address) { return range_of(address).end ? *reinterpret_cast<const u8*>(address) : random_byte(); }

// Memory that a lane has for itself: local memory, a frame's parameters, a kernel's. nullptr if it ends before.
u8* private_memory(Warp& w, const Instruction& i, u64 at, u32 bytes, int lane) {
  Frame& frame = *w.frame;
  const bool is_local = i.space == Space::kLocal, is_kernels = !is_local && at < kFrameParameters;
  const auto each = static_cast<u64>(is_local ? frame.f.local_bytes : frame.f.parameter_bytes);
  if (!is_local && !is_kernels) at -= kFrameParameters;
  if (check_alignment(w, i, at, bytes)) {
    if (is_kernels && frame.f.is_kernel && at + bytes <= w.block.parameters.size())
      return const_cast<u8*>(w.block.parameters.data()) + at;
    if (!is_kernels && at + bytes <= each)
      return (is_local ? frame.local : frame.parameters).data() + each * static_cast<u64>(lane) + at;
    w.report("out of bounds", i, is_local ? "local memory" : "parameters");
  }
  return nullptr;
}

u64 address_of(const Warp& w, const Operand& o, i64 offset, int lane) {
  return w.value(o, lane) + static_cast<u64>(offset);
}

void read_source(const Warp& w, AsyncCopy& copy, int lane) {
  for (u32 b = 0; b < copy.bytes; ++b) {
    const u64 at = copy.from + b;
    copy.state[b] = Byte::kDefined;
    copy.data[b] = 0;
    if (b >= copy.read) continue;
    copy.data[b] = byte_or_random(at);
    // Bytes that another thread writes meanwhile may be read before or after the write.
    if (!range_of(at).end || writer_is_unordered(global_access(at), who(w, lane))) copy.state[b] = Byte::kUndefined;
  }
}

}  // namespace

void add_allocation(u64 address, u64 bytes) {
  const std::lock_guard<std::mutex> lock(allocations_lock);
  allocations[address] = bytes;
}

void remove_allocation(u64 address) {
  const std::lock_guard<std::mutex> lock(allocations_lock);
  allocations.erase(address);
}

void begin_launch() {
  ++launch_number;
  if (pages.size() > 1024) pages.clear();
}

void load_memory(Warp& w, const Instruction& i, u32 mask) {
  const u32 bytes = i.bytes * i.count;
  u32 undefined[4] = {};  // lanes, per element
  if (const u32 bad = w.undefined(i.from[0]) & mask) {
    w.report("a load from an undefined address", i);
    mask &= ~bad;
  }
  for_lanes(mask, [&](int lane) {
    const u64 at = address_of(w, i.from[0], i.offset, lane);
    u8 data[32] = {};
    const Byte* state = nullptr;
    if (i.space == Space::kGlobal) {
      const bool is_word = bytes == 16 && at % 16 == 0;
      if (is_word && is_part(at)) {
        for (u32 b = 0; b < 16; ++b) data[b] = byte_or_random(at + b);
      } else if (check_global(w, i, at, bytes)) {
        std::memcpy(data, reinterpret_cast<const void*>(at), bytes);
        for (u32 b = 0; b < bytes; ++b) {
          Access& access = global_access(at + b);
          if (!options().loads_for_copies) {
            note_read(w, i, access, who(w, lane));
          } else if (writer_is_unordered(access, who(w, lane))) {
            if (!is_word) w.report("race: a read of what another thread writes", i);
            data[b] = random_byte();
          }
        }
      }
    } else if (i.space == Space::kShared) {
      if (check_shared(w, i, static_cast<u32>(at), bytes)) {
        const u64 begin = at - kSharedBase;
        std::memcpy(data, w.block.shared.data() + begin, bytes);
        state = w.block.shared_state.data() + begin;
        for (u32 b = 0; b < bytes; ++b) {
          if (state[b] == Byte::kPending) w.report("a load of what an asynchronous copy has yet to write", i);
          note_read(w, i, w.block.shared_access[begin + b], who(w, lane));
        }
      }
    } else if (const u8* const from = private_memory(w, i, at, bytes, lane)) {
      std::memcpy(data, from, bytes);
      if (i.space == Space::kLocal) state = w.frame->local_state.data() + (from - w.frame->local.data());
    }
    for (u32 b = 0; state && b < bytes; ++b)
      if (state[b] != Byte::kDefined) undefined[b / i.bytes] |= 1u << lane;
    for (u32 k = 0; k < i.count; ++k) {
      const Operand& to = i.to[k];
      u64 value = 0;
      std::memcpy(&value, data + k * i.bytes, i.bytes);
      if (i.extends_sign && i.bytes < 8 && value >> (8 * i.bytes - 1) & 1) value |= ~0ull << (8 * i.bytes);
      if (to.half) value &= 0xffff;
      if (to.bank == Bank::kBits64) w.write64(to)[lane] = value;
      if (to.bank == Bank::kBits32) w.write32(to)[lane] = static_cast<u32>(value);
    }
  });
  for (u32 k = 0; k < i.count; ++k) w.mark(i.to[k], undefined[k], mask);
}

void store_memory(Warp& w, const Instruction& i, u32 mask) {
  const u32 bytes = i.bytes * i.count;
  if (const u32 bad = w.undefined(i.from[0]) & mask) {
    w.report("a store to an undefined address", i);
    mask &= ~bad;
  }
  for_lanes(mask, [&](int lane) {
    const u64 at = address_of(w, i.from[0], i.offset, lane);
    u8 data[32];
    Byte state[32];
    bool is_defined = true;
    for (u32 k = 0; k < i.count; ++k) {
      const Operand& from = i.from[1 + k];
      const u64 value = w.value(from, lane);
      const bool defined = !(w.undefined(from) >> lane & 1);
      std::memcpy(data + k * i.bytes, &value, i.bytes);
      std::fill_n(state + k * i.bytes, i.bytes, defined ? Byte::kDefined : Byte::kUndefined);
      is_defined &= defined;
    }
    if (i.space == Space::kGlobal) {
      if (!is_defined) w.report("an undefined value is stored to global memory", i);
      if (!check_global(w, i, at, bytes)) return;
      auto* const to = reinterpret_cast<u8*>(at);
      for (u32 b = 0; b < bytes; ++b) note_write(w, i, global_access(at + b), who(w, lane), to[b] != data[b]);
      std::memcpy(to, data, bytes);
    } else if (i.space == Space::kShared) {
      if (!check_shared(w, i, static_cast<u32>(at), bytes)) return;
      for (u32 b = 0; b < bytes; ++b) {
        const u64 k = at - kSharedBase + b;
        Byte& old = w.block.shared_state[k];
        if (old == Byte::kPending) w.report("a store to where an asynchronous copy has yet to write", i);
        const bool changes = old != Byte::kDefined || w.block.shared[k] != data[b];
        note_write(w, i, w.block.shared_access[k], who(w, lane), changes);
        old = state[b];
        w.block.shared[k] = data[b];
      }
    } else if (u8* const to = private_memory(w, i, at, bytes, lane)) {
      std::memcpy(to, data, bytes);
      if (i.space == Space::kLocal) {
        std::copy_n(state, bytes, w.frame->local_state.data() + (to - w.frame->local.data()));
      } else if (!is_defined) {
        w.report("an undefined value is passed to or from a function", i);
      }
    }
  });
}

void atomic(Warp& w, const Instruction& i, u32 mask) {
  if ((w.undefined(i.from[0]) | w.undefined(i.from[1])) & mask)
    w.report("an atomic operation on something undefined", i);
  for_lanes(mask, [&](int lane) {
    const u64 at = address_of(w, i.from[0], i.offset, lane), other = w.value(i.from[1], lane);
    if (!check_global(w, i, at, 8)) return;
    for (u32 b = 0; b < 8; ++b) note_write(w, i, global_access(at + b), who(w, lane), true, true);
    u64& now = *reinterpret_cast<u64*>(at);
    if (i.to[0].bank == Bank::kBits64) w.write64(i.to[0])[lane] = now;
    now = i.immediate ? std::max(now, other) : now + other;
  });
  w.mark(i.to[0], 0, mask);
}

// Begins an asynchronous copy, whose target is undefined until the copy has been waited for.
void begin_copy(Warp& w, const Instruction& i, u32 mask) {
  if ((w.undefined(i.from[0]) | w.undefined(i.from[1])) & mask)
    w.report("an asynchronous copy with an undefined address", i);
  for_lanes(mask, [&](int lane) {
    const auto to = static_cast<u32>(address_of(w, i.from[0], i.offset, lane));
    const u64 from = address_of(w, i.from[1], i.source_offset, lane);
    AsyncCopy copy{to - kSharedBase, from, i.bytes, i.immediate, {}, {}};
    if (!check_shared(w, i, to, i.bytes) || !check_alignment(w, i, from, i.bytes)) return;
    if (!(copy.read == 16 && is_part(from)) && copy.read > 0 && !check_global(w, i, from, i.bytes)) return;
    for (u32 b = 0; b < copy.bytes; ++b) {
      Byte& state = w.block.shared_state[copy.to + b];
      if (state == Byte::kPending) w.report("two asynchronous copies to one place", i);
      note_write(w, i, w.block.shared_access[copy.to + b], who(w, lane), true);
      state = Byte::kPending;
      w.block.shared[copy.to + b] = random_byte();
    }
    w.copies[lane].begun.push_back(copy);
  });
}

void commit_copies(Warp& w, const Instruction&, u32 mask) {
  for_lanes(mask, [&](int lane) {
    LaneCopies& copies = w.copies[lane];
    copies.groups.push_back(std::move(copies.begun));
    copies.begun.clear();
  });
}

void wait_for_copies(Warp& w, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](int lane) {
    auto& groups = w.copies[lane].groups;
    for (; groups.size() > i.immediate; groups.pop_front()) {
      for (AsyncCopy& copy : groups.front()) {
        read_source(w, copy, lane);
        std::copy_n(copy.data, copy.bytes, w.block.shared.begin() + copy.to);
        std::copy_n(copy.state, copy.bytes, w.block.shared_state.begin() + copy.to);
        const Who now = who(w, lane);
        for (u32 b = 0; b < copy.bytes; ++b) {
          Access& access = w.block.shared_access[copy.to + b];
          access.writer = now.thread;
          access.writer_warp_epoch = now.warp_epoch, access.writer_block_epoch = now.block_epoch;
        }
      }
    }
  });
}

void check_copies_at_end(const Warp& w, u32 mask) {
  for_lanes(mask, [&](int lane) {
    const LaneCopies& copies = w.copies[lane];
    const auto has_some = [](const std::vector<AsyncCopy>& group) { return !group.empty(); };
    if (has_some(copies.begun) || std::any_of(copies.groups.begin(), copies.groups.end(), has_some))
      report("a lane ends with asynchronous copies that nobody waited for", w.block.kernel.name);
  });
}

}  // namespace ptx
