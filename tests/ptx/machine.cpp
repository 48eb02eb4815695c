// Runs launches: thread blocks one after the other, warps from barrier to barrier, lanes in lock step.
#include "machine.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace ptx {
namespace {

std::mt19937 generator;
std::map<std::string, std::string> reports;  // where, by what and the function

enum class End { kEnded, kBarrier, kInterrupted };

End run(Warp& w, Frame& frame, bool is_kernel);

u32 lowest_pc(const Frame& frame, u32 lanes) {
  u32 lowest = ~0u;
  for_lanes(lanes, [&](int lane) { lowest = std::min(lowest, frame.pc[lane]); });
  return lowest;
}

u32 lanes_at(const Frame& frame, u32 lanes, u32 pc) {
  u32 found = 0;
  for (int lane = 0; lane < kWarp; ++lane)
    found |= static_cast<u32>((lanes >> lane & 1) && frame.pc[lane] == pc) << lane;
  return found;
}

void put(Frame& frame, u32 lanes, u32 pc) {
  for_lanes(lanes, [&](int lane) { frame.pc[lane] = pc; });
}

u32 guarded(const Frame& frame, const Instruction& i, u32 lanes) {
  if (i.guard < 0) return lanes;
  const u32 p = frame.predicates[static_cast<size_t>(i.guard)];
  return lanes & (i.guard_negated ? ~p : p);
}

void call(Warp& w, Frame& frame, const Instruction& i, u32 mask) {
  const Call& made = frame.f.calls[static_cast<size_t>(i.call)];
  const Function& callee = *made.function;
  Frame inner(*made.function, mask);
  const auto outer_of = [&](int lane) { return frame.parameters.data() + lane * frame.f.parameter_bytes; };
  const auto inner_of = [&](int lane) { return inner.parameters.data() + lane * callee.parameter_bytes; };
  for (size_t k = 0; k < made.arguments.size(); ++k) {
    const Variable from = made.arguments[k], to = callee.parameters.at(k);
    if (from.bytes != to.bytes) throw std::runtime_error("ptx: arguments of other sizes for " + callee.name);
    for_lanes(mask, [&](int lane) {
      std::memcpy(inner_of(lane) + to.offset, outer_of(lane) + from.offset, static_cast<size_t>(to.bytes));
    });
  }
  run(w, inner, false);
  w.frame = &frame;
  if (made.result.bytes == 0) return;
  for_lanes(mask, [&](int lane) {
    std::memcpy(outer_of(lane) + made.result.offset, inner_of(lane) + callee.result.offset,
                static_cast<size_t>(made.result.bytes));
  });
}

// The lanes of a warp's exchange that have come, when all that it names have; 0 while some have not.
u32 gather(Warp& w, Frame& frame, const Instruction& i, u32 active, u32 pc) {
  const u32* const members = w.read32(i.members);
  const u32 named = members[__builtin_ctz(active)];
  for_lanes(active, [&](int lane) {
    if (members[lane] != named) w.report("lanes of a warp's exchange name different members", i);
  });
  if (w.undefined(i.members) & active) w.report("the members of a warp's exchange are undefined", i);
  if (i.guard >= 0) w.report("a warp's exchange under a guard", i);
  if (active & ~named) w.report("a lane takes part in an exchange that does not name it", i);
  if (named & w.exited) w.report("a warp's exchange names lanes that have ended", i);
  const u32 arrived = active | lanes_at(frame, frame.waiting, pc);
  if (named & ~arrived & ~w.exited) {
    put(frame, active, pc);
    frame.waiting |= active;
    return 0;
  }
  frame.waiting &= ~arrived;
  return arrived;
}

void execute(Warp& w, const Instruction& i, u32 mask) {
  if (mask == 0) return;
  if (i.marks) return i.handler(w, i, mask);
  u32 undefined = 0;
  for (int k = 0; k < i.sources; ++k) undefined |= w.undefined(i.from[k]);
  i.handler(w, i, mask);
  for (int k = 0; k < i.targets; ++k) w.mark(i.to[k], undefined, mask);
}

// Goes on with the lanes at one instruction until they part, wait or end, or others come to stand below them.
void run_lanes(Warp& w, Frame& frame, bool is_kernel, u32 active, u32 pc, u32 next_pc, u64 last_instruction) {
  Counters& total = counters();
  while (pc < next_pc && total.instructions < last_instruction) {
    const Instruction& i = frame.f.code[pc];
    u32 mask = guarded(frame, i, active);
    if (i.guard >= 0 && (frame.undefined_predicates[static_cast<size_t>(i.guard)] & active))
      w.report("a guard is undefined", i);
    ++total.instructions;
    switch (i.kind) {
      case Kind::kPlain:
        execute(w, i, mask);
        break;
      case Kind::kBranch:
        if (mask == active) {
          pc = static_cast<u32>(i.target);
          continue;
        }
        if (mask == 0) break;
        put(frame, mask, static_cast<u32>(i.target));
        return put(frame, active & ~mask, pc + 1);
      case Kind::kReturn:
        frame.live &= ~mask;
        if (is_kernel) {
          w.exited |= mask;
          check_copies_at_end(w, mask);
        }
        return put(frame, active & ~mask, pc + 1);
      case Kind::kCall:
        if (options().any_path && (frame.live & ~frame.waiting & ~frame.parked & ~active)) {
          frame.parked |= active;
          return put(frame, active, pc);
        }
        active |= lanes_at(frame, frame.parked, pc);
        frame.parked &= ~active;
        mask = guarded(frame, i, active);
        if (mask) call(w, frame, i, mask);
        break;
      case Kind::kBarrier:
        if (!is_kernel) throw std::runtime_error("ptx: a barrier within a function: " + frame.f.name);
        if (mask != active) w.report("a barrier under a guard that lanes differ in", i);
        frame.waiting |= active;
        frame.at_barrier = true;
        return put(frame, active, pc + 1);
      case Kind::kWarpExchange:
        active = gather(w, frame, i, active, pc);
        if (active == 0) return;
        execute(w, i, active);
        break;
    }
    ++pc;
  }
  put(frame, active, pc);
}

End run(Warp& w, Frame& frame, bool is_kernel) {
  w.frame = &frame;
  const auto turn = static_cast<u32>(options().turn);
  const u64 last = is_kernel && turn ? counters().instructions + 1 + random_below(2 * turn) : ~0ull;
  while (counters().instructions < last) {
    u32 runnable = frame.live & ~frame.waiting & ~frame.parked;
    if (!runnable && frame.parked) {
      runnable = lanes_at(frame, frame.parked, lowest_pc(frame, frame.parked));
      frame.parked &= ~runnable;
    }
    if (!runnable) {
      if (!frame.live) return End::kEnded;
      if (!frame.at_barrier) {
        w.report("lanes wait for others of their warp that never come",
                 frame.f.code[frame.pc[__builtin_ctz(frame.live)]]);
        throw std::runtime_error("ptx: a warp hangs in " + frame.f.name);
      }
      const u32 pc = frame.pc[__builtin_ctz(frame.live)];
      if (lanes_at(frame, frame.live, pc) != frame.live)
        w.report("lanes of a warp wait in different places", frame.f.code[pc]);
      frame.at_barrier = false;
      frame.waiting = 0;
      return End::kBarrier;
    }
    u32 pc = lowest_pc(frame, runnable);
    if (options().any_path) {
      u32 rest = runnable;
      for (u32 n = random_below(static_cast<u32>(__builtin_popcount(runnable))); n; --n) rest &= rest - 1;
      pc = frame.pc[__builtin_ctz(rest)];
    }
    const u32 active = lanes_at(frame, runnable, pc);
    u32 others = runnable & ~active;
    for_lanes(others, [&](int lane) { others &= ~(static_cast<u32>(frame.pc[lane] < pc) << lane); });
    run_lanes(w, frame, is_kernel, active, pc, lowest_pc(frame, others), last);
  }
  return End::kInterrupted;
}

void run_block(Block& block) {
  const u32 count = (block.threads + kWarp - 1) / kWarp;
  std::vector<std::unique_ptr<Warp>> warps;
  for (u32 index = 0; index < count; ++index) {
    const u32 lanes = std::min<u32>(kWarp, block.threads - index * kWarp);
    warps.push_back(std::make_unique<Warp>(block, index, kAllLanes >> (kWarp - lanes)));
  }
  std::vector<Warp*> left;
  for (const auto& warp : warps) left.push_back(warp.get());
  while (!left.empty()) {
    std::vector<Warp*> running = left, at_barrier;
    if (options().any_order) std::shuffle(running.begin(), running.end(), generator);
    while (!running.empty()) {
      const auto next = running.begin() + (options().turn ? random_below(static_cast<u32>(running.size())) : 0);
      const End end = run(**next, *(*next)->kernel_frame, true);
      if (end == End::kInterrupted) continue;
      if (end == End::kBarrier) at_barrier.push_back(*next);
      running.erase(next);
    }
    if (!at_barrier.empty() && at_barrier.size() < warps.size())
      report("warps have ended while others wait at a barrier", block.kernel.name);
    std::sort(at_barrier.begin(), at_barrier.end(), [](const Warp* a, const Warp* b) { return a->index < b->index; });
    left = at_barrier;
    ++block.epoch;
    for (const auto& warp : warps) ++warp->epoch;
  }
}

}  // namespace

Options& options() {
  static Options made;
  return made;
}

Counters& counters() {
  static Counters made;
  return made;
}

u32 random_below(u32 n) { return generator() % n; }
u8 random_byte() { return static_cast<u8>(generator()); }

void report(const std::string& what, const std::string& function, const std::string& where) {
  reports.emplace(what + ", " + function, where);
}

std::vector<std::string> take_reports() {
  std::vector<std::string> found;
  for (const auto& [what, where] : reports) found.push_back(what + ", " + where);
  reports.clear();
  return found;
}

Frame::Frame(Function& function, u32 lanes)
    : f(function),
      bits32(static_cast<size_t>(f.count32) * kWarp, 0xdeadbeef),
      undefined32(static_cast<size_t>(f.count32), kAllLanes),
      bits64(static_cast<size_t>(f.count64) * kWarp, 0xdeadbeefdeadbeef),
      undefined64(static_cast<size_t>(f.count64), kAllLanes),
      predicates(static_cast<size_t>(f.predicates)),
      undefined_predicates(static_cast<size_t>(f.predicates), kAllLanes),
      parameters(static_cast<size_t>(f.parameter_bytes) * kWarp, 0xcd),
      local(static_cast<size_t>(f.local_bytes) * kWarp, 0xcd),
      local_state(local.size(), Byte::kUndefined),
      live(lanes) {}

Warp::Warp(Block& of, u32 number, u32 lanes)
    : block(of),
      index(number),
      exited(~lanes),
      kernel_frame(std::make_unique<Frame>(const_cast<Function&>(of.kernel), lanes)),
      frame(kernel_frame.get()) {}

void launch(Function& f, u32 grid, u32 block, u32 dynamic_shared, const std::vector<u8>& parameters) {
  generator.seed(static_cast<u32>(options().seed) + static_cast<u32>(++counters().launches));
  begin_launch();
  std::vector<u32> order(grid);
  std::iota(order.begin(), order.end(), 0u);
  if (options().any_order) std::shuffle(order.begin(), order.end(), generator);
  const u32 shared =
      f.uses_dynamic_shared ? static_cast<u32>(f.dynamic_offset()) + dynamic_shared : static_cast<u32>(f.static_shared);
  for (const u32 index : order) {
    Block made{f,
               index,
               block,
               1,
               parameters,
               std::vector<u8>(shared),
               std::vector<Byte>(shared),
               std::vector<Access>(shared)};
    std::generate(made.shared.begin(), made.shared.end(), random_byte);
    run_block(made);
  }
}

}  // namespace ptx
